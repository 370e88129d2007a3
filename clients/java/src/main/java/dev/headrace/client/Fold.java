package dev.headrace.client;

import dev.headrace.v1.Delta;
import dev.headrace.v1.Finished;
import dev.headrace.v1.ResultEvent;
import dev.headrace.v1.ToolCallDelta;
import io.grpc.Status;
import java.util.ArrayList;
import java.util.List;
import java.util.Optional;

/**
 * Joins the events of one request. It takes each number once and in order: an event that is
 * missing, repeated or out of place ends the request with DATA_LOSS, so that output is never
 * silently wrong. Its user keeps threads apart.
 */
final class Fold {
  /** Beyond every server's limit: an index that is wrong must not take memory. */
  private static final int MOST_CHOICES = 1 << 16;

  private String id;
  private int n; // how many choices it has; 0: not known, Accepted tells it
  private long next; // the number of the event that comes next
  private String instance = "";
  private boolean hasBegun; // whether there was output
  private Optional<Accepted> accepted = Optional.empty();
  private Optional<Prompt> prompt = Optional.empty();
  private List<ChoiceFold> choices = new ArrayList<>(1);
  private int finished;
  private HeadraceException error;
  private boolean done;
  private boolean wasTold; // whether its events told the end: nothing follows

  Fold(String id, int n, long from) {
    this.id = id;
    this.n = n;
    this.next = Math.max(from, 1);
  }

  String id() {
    return id;
  }

  long next() {
    return next;
  }

  boolean hasBegun() {
    return hasBegun;
  }

  boolean isDone() {
    return done;
  }

  boolean wasTold() {
    return wasTold;
  }

  /** Why the request failed, or null. */
  HeadraceException error() {
    return error;
  }

  Optional<Accepted> accepted() {
    return accepted;
  }

  void setInstance(String instance) {
    this.instance = instance;
  }

  /** The end was told beside the events. */
  void end() {
    done = true;
  }

  /** Takes the next event. It returns its output, or null if it has none. */
  Chunk add(ResultEvent event) {
    if (event.hasAccepted() && id.isEmpty()) {
      id = event.getAccepted().getRequestId();
    }
    String problem = problem(event);
    if (problem != null) {
      fail(
          HeadraceException.of(
              Status.Code.DATA_LOSS,
              "the server broke the contract: " + problem,
              HeadraceException.Origin.PROTOCOL));
      return null;
    }
    next++;
    switch (event.getEventCase()) {
      case DELTA:
        hasBegun = true;
        return choice(event.getChoiceIndex()).add(event, event.getDelta());
      case ACCEPTED:
        accepted = Optional.of(Accepted.of(id, event.getAccepted()));
        n = event.getAccepted().getN() > 0 ? event.getAccepted().getN() : Math.max(n, 1);
        return null;
      case PROMPT:
        prompt = Optional.of(Prompt.of(event.getPrompt()));
        return null;
      case FINISHED:
        choice(event.getChoiceIndex()).end = event.getFinished();
        finished++;
        if (n > 0 && finished >= n) {
          done = true;
          wasTold = true;
        }
        return null;
      case FAILED:
        fail(HeadraceException.of(event.getFailed().getStatus(), id));
        wasTold = true;
        return null;
      default:
        return null; // an event that is newer than this package is counted and passed over
    }
  }

  private String problem(ResultEvent event) {
    if (event.hasAccepted() && !event.getAccepted().getRequestId().equals(id)) {
      return event.getAccepted().getRequestId() + " was accepted where " + id + " was due";
    }
    int index = event.getChoiceIndex();
    String what;
    if (event.getSeq() != next) {
      what = " came where " + next + " was due";
    } else if (done || !event.hasFailed() && hasEnded(index)) {
      what = " came after the end";
    } else if (index < 0 || index >= MOST_CHOICES || n > 0 && index >= n) {
      what = " is of choice " + Integer.toUnsignedString(index) + ", out of " + n;
    } else {
      return null;
    }
    return "event " + Long.toUnsignedString(event.getSeq()) + what;
  }

  private boolean hasEnded(int index) {
    return index >= 0
        && index < choices.size()
        && choices.get(index) != null
        && choices.get(index).end != null;
  }

  private ChoiceFold choice(int index) {
    while (choices.size() <= index) {
      choices.add(null);
    }
    if (choices.get(index) == null) {
      choices.set(index, new ChoiceFold());
    }
    return choices.get(index);
  }

  /** Ends the request with an error; the first one stays. */
  void fail(HeadraceException why) {
    if (error == null) {
      Optional<Result> partial = why.partial();
      if (partial.isEmpty() && accepted.isPresent()) {
        partial = Optional.of(partial());
      }
      error = why.withPartial(why.requestId().isEmpty() ? id : why.requestId(), partial);
    }
    done = true;
  }

  /** Forgets all events: the request is sent again, and they begin anew. */
  void restart() {
    next = 1;
    instance = "";
    hasBegun = false;
    accepted = Optional.empty();
    prompt = Optional.empty();
    choices = new ArrayList<>(1);
    finished = 0;
    error = null;
    done = false;
    wasTold = false;
  }

  /** The output so far. */
  Result partial() {
    Usage usage =
        prompt.map(told -> Usage.prompt(told.tokens(), told.cachedTokens())).orElse(Usage.NONE);
    List<Choice> made = new ArrayList<>();
    for (int index = 0; index < Math.max(Math.max(n, choices.size()), 1); index++) {
      ChoiceFold known = index < choices.size() ? choices.get(index) : null;
      Choice choice = (known == null ? new ChoiceFold() : known).made(index);
      usage = usage.and(choice.usage());
      made.add(choice);
    }
    return new Result(id, instance, List.copyOf(made), usage, accepted, prompt);
  }

  /**
   * A fold that continues where this one was interrupted, with all its output. If the request's end
   * had arrived, it has that too.
   */
  Fold reopened() {
    Fold made = new Fold(id, n, next);
    made.instance = instance;
    made.hasBegun = hasBegun;
    made.accepted = accepted;
    made.prompt = prompt;
    made.finished = finished;
    for (ChoiceFold choice : choices) {
      made.choices.add(choice == null ? null : choice.copy());
    }
    if (wasTold) {
      made.done = true;
      made.wasTold = true;
      made.error = error;
    }
    return made;
  }

  private static final class ChoiceFold {
    private final StringBuilder text = new StringBuilder();
    private final StringBuilder reasoning = new StringBuilder();
    private UnsignedInts.Builder ids = new UnsignedInts.Builder();
    private final List<Token> tokens = new ArrayList<>(0);
    private final List<CallFold> calls = new ArrayList<>(0);
    private Finished end;

    Chunk add(ResultEvent event, Delta delta) {
      List<Token> details = Token.of(delta.getTokensList());
      UnsignedInts more = UnsignedInts.of(idsOf(delta));
      int offset = ids.size();
      text.append(delta.getText());
      reasoning.append(delta.getReasoning());
      ids.addAll(more);
      tokens.addAll(details);
      return new Chunk(
          event.getChoiceIndex(),
          event.getSeq(),
          offset,
          delta.getText(),
          delta.getReasoning(),
          addCalls(delta),
          more,
          details);
    }

    /** A delta's ids; with details each has its own there. */
    private static int[] idsOf(Delta delta) {
      int detailed = delta.getTokensCount();
      int[] ids = new int[detailed > 0 ? detailed : delta.getTokenIdsCount()];
      for (int i = 0; i < ids.length; i++) {
        ids[i] = detailed > 0 ? delta.getTokens(i).getId() : delta.getTokenIds(i);
      }
      return ids;
    }

    private List<Chunk.ToolCallPart> addCalls(Delta delta) {
      if (delta.getToolCallsCount() == 0) {
        return List.of();
      }
      List<Chunk.ToolCallPart> parts = new ArrayList<>(delta.getToolCallsCount());
      for (ToolCallDelta told : delta.getToolCallsList()) {
        parts.add(
            new Chunk.ToolCallPart(
                told.getIndex(), told.getId(), told.getName(), told.getArgumentsJson()));
        addCall(told);
      }
      return List.copyOf(parts);
    }

    /** Joins the parts of calls, which come in order: a call's first part has its id and name. */
    private void addCall(ToolCallDelta part) {
      if (Integer.compareUnsigned(part.getIndex(), calls.size()) >= 0) {
        calls.add(new CallFold(part.getId(), part.getName(), new StringBuilder()));
      }
      int index = Math.min(part.getIndex() & Integer.MAX_VALUE, calls.size() - 1);
      calls.get(index).arguments.append(part.getArgumentsJson());
    }

    Choice made(int index) {
      List<ToolCall> whole =
          calls.stream()
              .map(call -> new ToolCall(call.id, call.name, call.arguments.toString()))
              .toList();
      return Choice.of(
          index,
          text.toString(),
          reasoning.toString(),
          whole,
          ids.build(),
          List.copyOf(tokens),
          end == null ? Finished.getDefaultInstance() : end);
    }

    ChoiceFold copy() {
      ChoiceFold made = new ChoiceFold();
      made.text.append(text);
      made.reasoning.append(reasoning);
      made.ids = ids.copy();
      made.tokens.addAll(tokens);
      for (CallFold call : calls) {
        made.calls.add(
            new CallFold(call.id, call.name, new StringBuilder(call.arguments.toString())));
      }
      made.end = end;
      return made;
    }
  }

  private record CallFold(String id, String name, StringBuilder arguments) {}
}
