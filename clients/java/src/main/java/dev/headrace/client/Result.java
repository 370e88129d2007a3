package dev.headrace.client;

import dev.headrace.v1.GenerateResponse;
import java.util.List;
import java.util.Optional;

/**
 * The whole output of a request.
 *
 * @param requestId the request's id
 * @param instanceId the server process that ran it; empty: not known
 * @param choices the outputs, by their index; there is at least one
 * @param usage the cost in tokens, of all choices together
 * @param accepted the parameters in force, if they were received
 * @param prompt how the prompt was processed, if it was and that was received
 */
public record Result(
    String requestId,
    String instanceId,
    List<Choice> choices,
    Usage usage,
    Optional<Accepted> accepted,
    Optional<Prompt> prompt) {

  /**
   * The first choice.
   *
   * @return the only one, if the request did not ask for more
   */
  public Choice first() {
    return choices.get(0);
  }

  /**
   * The text of the first choice.
   *
   * @return what the model wrote
   */
  public String text() {
    return first().text();
  }

  /**
   * The token ids of the first choice.
   *
   * @return unsigned numbers of 32 bits
   */
  public List<Long> tokenIds() {
    return first().tokenIds();
  }

  /**
   * What the model thought before the first choice's text.
   *
   * @return empty, if it did not
   */
  public String reasoning() {
    return first().reasoning();
  }

  /**
   * The tool calls of the first choice.
   *
   * @return in order
   */
  public List<ToolCall> toolCalls() {
    return first().toolCalls();
  }

  /**
   * Why the first choice ended.
   *
   * @return the reason
   */
  public FinishReason finishReason() {
    return first().finishReason();
  }

  /**
   * The first choice as the assistant's message, for the next turn of a conversation.
   *
   * @return with its reasoning and its tool calls
   */
  public Message message() {
    Choice first = first();
    boolean isEmpty = first.text().isEmpty() && !first.toolCalls().isEmpty();
    return new Message(
        Message.Role.ASSISTANT,
        isEmpty ? Optional.empty() : Optional.of(first.text()),
        List.of(),
        "",
        first.toolCalls(),
        "",
        first.reasoning());
  }

  static Result of(GenerateResponse told) {
    return new Result(
        told.getRequestId(),
        told.getInstanceId(),
        told.getChoicesCount() == 0
            ? List.of(Choice.of(dev.headrace.v1.GeneratedChoice.getDefaultInstance()))
            : told.getChoicesList().stream().map(Choice::of).toList(),
        Usage.of(told.getUsage()),
        told.hasAccepted()
            ? Optional.of(Accepted.of(told.getRequestId(), told.getAccepted()))
            : Optional.empty(),
        told.hasPrompt() ? Optional.of(Prompt.of(told.getPrompt())) : Optional.empty());
  }
}
