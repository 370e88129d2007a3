package dev.headrace.client;

import dev.headrace.v1.AddCommand;
import dev.headrace.v1.AttachCommand;
import dev.headrace.v1.CancelCommand;
import dev.headrace.v1.CommandRejection;
import dev.headrace.v1.CreditCommand;
import dev.headrace.v1.GenerationServiceGrpc;
import dev.headrace.v1.OpenCommand;
import dev.headrace.v1.ResultEvent;
import dev.headrace.v1.SessionAttached;
import dev.headrace.v1.SessionDetached;
import dev.headrace.v1.StreamResultRequest;
import dev.headrace.v1.StreamResultResponse;
import io.grpc.ClientCall;
import io.grpc.Metadata;
import io.grpc.Status;
import java.time.Duration;
import java.util.HashMap;
import java.util.List;
import java.util.Map;

/**
 * A session's stream to one server. gRPC keeps what was sent until the connection takes it, and
 * calls the listener with one message at a time. The session's lock guards all of it.
 */
final class Wire extends ClientCall.Listener<StreamResultResponse> {
  private static final int AHEAD = 4; // how many messages may wait here for the listener
  private static final Duration LOAD_INTERVAL = Duration.ofSeconds(1);

  private final Session session;
  final Server server;
  private final ClientCall<StreamResultRequest, StreamResultResponse> call;

  String instance = ""; // the server's process, once it has answered
  Duration lease; // null: none was granted
  final Map<Integer, Handle> numbers = new HashMap<>(); // the live requests, by their numbers
  final Map<Long, Handle> commands = new HashMap<>(); // those whose add or attach was not answered
  HeadraceException refused; // why open was refused
  boolean isOver; // nothing more can be sent
  private long last; // the number of the last command
  private long open; // the number of the open command; 0: none was sent

  private Wire(Session session, Server server) {
    this.session = session;
    this.server = server;
    call =
        Calls.open(
            server, GenerationServiceGrpc.getStreamResultMethod(), session.context, session.trace);
  }

  /** The stream to a server, opened with the first use. */
  static Wire to(Session session, Server server) {
    Wire known = session.wires.get(server);
    if (known != null) {
      return known;
    }
    Wire made = new Wire(session, server);
    session.wires.put(server, made);
    made.start();
    session.moves().endOrphans(made);
    return made;
  }

  private void start() {
    call.start(this, new Metadata());
    call.request(AHEAD);
    OpenCommand.Builder opening =
        OpenCommand.newBuilder().setInitialCredit(session.options.initialCredit());
    if (!session.options.lease().isZero()) {
      opening.setLease(Durations.to(session.options.lease()));
    }
    if (session.pool.many) {
      opening.setLoadInterval(Durations.to(LOAD_INTERVAL));
    }
    OpenCommand told = opening.build();
    if (!told.equals(OpenCommand.getDefaultInstance())) {
      open = send(StreamResultRequest.newBuilder().setOpen(told));
    }
  }

  /** Sends a command, and returns its number. */
  private long send(StreamResultRequest.Builder command) {
    command.setCommandId(++last);
    command.addAllRequiredCapabilities(Capabilities.of(command.build(), List.of()));
    if (!isOver) { // else its end is about to be told
      call.sendMessage(command.build());
    }
    return last;
  }

  void sendAdd(Handle handle) {
    handle.command =
        send(StreamResultRequest.newBuilder().setAdd(AddCommand.newBuilder().setSpec(handle.spec)));
    commands.put(handle.command, handle);
  }

  void sendAttach(Handle handle) {
    AttachCommand attach =
        AttachCommand.newBuilder()
            .setRequestId(handle.id)
            .setFromSeq(handle.nextSeq())
            .setInstanceId(handle.instance)
            .build();
    handle.command = send(StreamResultRequest.newBuilder().setAttach(attach));
    commands.put(handle.command, handle);
  }

  void sendCancel(String id, String instance) {
    send(
        StreamResultRequest.newBuilder()
            .setCancel(CancelCommand.newBuilder().setRequestId(id).setInstanceId(instance)));
  }

  void sendCredit(String id, int tokens) {
    send(
        StreamResultRequest.newBuilder()
            .setCredit(CreditCommand.newBuilder().setRequestId(id).setTokens(tokens)));
  }

  void halfClose() {
    if (!isOver) {
      isOver = true;
      call.halfClose();
    }
  }

  void cut(String why) {
    isOver = true;
    call.cancel(why, null);
  }

  // ---- gRPC's calls
  // ------------------------------------------------------------------------------

  @Override
  public void onMessage(StreamResultResponse message) {
    synchronized (session.lock) {
      receive(message);
    }
    call.request(1);
  }

  @Override
  public void onClose(Status status, Metadata trailers) {
    HeadraceException failure = refused;
    if (failure == null && !status.isOk()) {
      failure = Calls.errorOf(server, session.context, status, trailers, "");
    }
    session.moves().lost(this, failure);
  }

  private void receive(StreamResultResponse message) {
    noteServer(message);
    if (message.hasOpened() && message.getOpened().hasLease()) {
      lease = Durations.from(message.getOpened().getLease());
    }
    for (CommandRejection rejection : message.getRejectionsList()) {
      long number = rejection.getCommandId();
      if (number != 0 && number == open) {
        refused = HeadraceException.of(rejection.getStatus(), "");
        cut("the session was refused");
        return;
      }
      Handle handle = commands.get(number);
      if (handle != null) { // else of a cancel or a credit whose request has just ended
        session
            .moves()
            .refused(this, handle, HeadraceException.of(rejection.getStatus(), handle.id));
      }
    }
    for (SessionDetached detached : message.getDetachedList()) {
      Handle handle = numbers.get(detached.getRequestNumber());
      if (handle != null) {
        session.fail(handle, HeadraceException.moved(handle.id));
      }
    }
    for (SessionAttached attached : message.getAttachedList()) {
      Handle handle = commands.get(attached.getCommandId());
      if (handle != null) {
        number(handle, attached.getRequestNumber());
      }
    }
    message.getEventsList().forEach(this::take);
  }

  private void noteServer(StreamResultResponse message) {
    if (!message.getInstanceId().isEmpty()) {
      instance = message.getInstanceId();
      session.pool.noteInstance(server, instance);
    }
    if (message.hasLoad()) {
      session.pool.noteLoad(server, message.getLoad());
    }
  }

  /** Notes by which number the server calls a request; it is there. */
  private void number(Handle handle, int number) {
    commands.remove(handle.command, handle);
    handle.number = number;
    numbers.put(number, handle);
    if (!handle.instance.equals(instance)) {
      handle.instance = instance;
      session.pool.noteOwner(handle.id, instance);
    }
  }

  private void take(ResultEvent event) {
    if (event.hasAccepted()) {
      Handle handle = session.live.get(event.getAccepted().getRequestId());
      if (handle != null && handle.wire == this && handle.number == 0) {
        number(handle, event.getRequestNumber());
      }
    }
    Handle handle = numbers.get(event.getRequestNumber());
    if (handle == null) {
      return; // of a request that failed here before its last events came
    }
    session.payLocked(handle, this, handle.take(this, event));
    if (handle.isDone()) {
      session.moves().over(this, handle, event.hasFailed());
    }
  }
}
