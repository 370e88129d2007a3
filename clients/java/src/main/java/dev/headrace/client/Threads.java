package dev.headrace.client;

import java.util.concurrent.Executor;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.LinkedBlockingQueue;
import java.util.concurrent.ScheduledExecutorService;
import java.util.concurrent.ScheduledThreadPoolExecutor;
import java.util.concurrent.ThreadFactory;
import java.util.concurrent.ThreadPoolExecutor;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicInteger;

/**
 * A client's threads: one for times and the library's own steps, which never runs what is a user's;
 * and a few, while they are needed, for users' callbacks, unless an executor was given for them.
 */
final class Threads {
  private static final int LEAST_CALLBACK_THREADS = 4;

  final ScheduledExecutorService timer;
  final Executor callbacks;
  private final ExecutorService own; // null: the callbacks' executor is the user's

  Threads(Executor given) {
    ScheduledThreadPoolExecutor single =
        new ScheduledThreadPoolExecutor(
            1, named("headrace-timer"), new ThreadPoolExecutor.DiscardPolicy());
    single.setRemoveOnCancelPolicy(true);
    timer = single;
    if (given != null) {
      callbacks = given;
      own = null;
      return;
    }
    int most = Math.max(LEAST_CALLBACK_THREADS, Runtime.getRuntime().availableProcessors());
    ThreadPoolExecutor few =
        new ThreadPoolExecutor(
            most,
            most,
            1,
            TimeUnit.SECONDS,
            new LinkedBlockingQueue<>(),
            named("headrace-callback"),
            (late, pool) -> late.run()); // after the close: nobody else would tell of the end
    few.allowCoreThreadTimeOut(true);
    callbacks = few;
    own = few;
  }

  private static ThreadFactory named(String name) {
    AtomicInteger count = new AtomicInteger();
    return work -> {
      Thread made = new Thread(work, name + "-" + count.incrementAndGet());
      made.setDaemon(true);
      return made;
    };
  }

  /** Ends the threads. Callbacks that are due are run before. */
  void close() {
    timer.shutdownNow();
    if (own != null) {
      own.shutdown();
    }
  }
}
