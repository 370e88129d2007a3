package dev.headrace.client;

import dev.headrace.v1.ChatMessage;
import dev.headrace.v1.ChatRole;
import dev.headrace.v1.ContentPart;
import dev.headrace.v1.ContentParts;
import java.util.List;
import java.util.Optional;

/**
 * One message of a conversation.
 *
 * @param role who speaks
 * @param content what is said; empty: the template sees a message without content, as beside tool
 *     calls
 * @param parts what is said in several parts, for templates that take such; then there is no
 *     content
 * @param name the speaker's name, for templates that use it; may be empty
 * @param toolCalls the calls that the assistant made in this message
 * @param toolCallId the id of the call that this message answers, if it is a tool's; else empty
 * @param reasoning what the assistant thought before it answered, for templates that replay it; may
 *     be empty
 */
public record Message(
    Role role,
    Optional<String> content,
    List<String> parts,
    String name,
    List<ToolCall> toolCalls,
    String toolCallId,
    String reasoning) {

  /** Who speaks in a message. */
  public enum Role {
    /** What the model is told about its task. */
    SYSTEM(ChatRole.CHAT_ROLE_SYSTEM),
    /** The user. */
    USER(ChatRole.CHAT_ROLE_USER),
    /** The model. */
    ASSISTANT(ChatRole.CHAT_ROLE_ASSISTANT),
    /** A tool, which answers a call. */
    TOOL(ChatRole.CHAT_ROLE_TOOL),
    /** The application, for templates that know it apart from the system. */
    DEVELOPER(ChatRole.CHAT_ROLE_DEVELOPER);

    private final ChatRole told;

    Role(ChatRole told) {
      this.told = told;
    }
  }

  /**
   * Makes a message. There is content or there are parts, not both.
   *
   * @param role as above
   * @param content as above
   * @param parts as above
   * @param name as above
   * @param toolCalls as above
   * @param toolCallId as above
   * @param reasoning as above
   * @throws HeadraceException if a value cannot be used
   */
  public Message {
    parts = List.copyOf(parts);
    toolCalls = List.copyOf(toolCalls);
    if (content.isPresent() && !parts.isEmpty()) {
      throw HeadraceException.invalid("messages", "a message has content or parts, not both");
    }
  }

  private static Message of(Role role, String content) {
    return new Message(role, Optional.of(content), List.of(), "", List.of(), "", "");
  }

  /**
   * What the model is told about its task.
   *
   * @param content the text
   * @return the message
   */
  public static Message system(String content) {
    return of(Role.SYSTEM, content);
  }

  /**
   * What the user says.
   *
   * @param content the text
   * @return the message
   */
  public static Message user(String content) {
    return of(Role.USER, content);
  }

  /**
   * What the model has said.
   *
   * @param content the text
   * @return the message
   */
  public static Message assistant(String content) {
    return of(Role.ASSISTANT, content);
  }

  /**
   * Calls that the model has made, and no text.
   *
   * @param calls the calls, as a result has them
   * @return the message
   */
  public static Message assistant(List<ToolCall> calls) {
    return of(Role.ASSISTANT, "").withContent(Optional.empty()).withToolCalls(calls);
  }

  /**
   * A tool's answer.
   *
   * @param call what it answers
   * @param content what the model is told
   * @return the message
   */
  public static Message tool(ToolCall call, String content) {
    return new Message(
        Role.TOOL, Optional.of(content), List.of(), call.name(), List.of(), call.id(), "");
  }

  /**
   * This message with other content.
   *
   * @param content what is said, or nothing
   * @return another message
   */
  public Message withContent(Optional<String> content) {
    return new Message(role, content, parts, name, toolCalls, toolCallId, reasoning);
  }

  /**
   * This message with other tool calls.
   *
   * @param toolCalls the calls that the assistant made in it
   * @return another message
   */
  public Message withToolCalls(List<ToolCall> toolCalls) {
    return new Message(role, content, parts, name, toolCalls, toolCallId, reasoning);
  }

  ChatMessage told() {
    ChatMessage.Builder made =
        ChatMessage.newBuilder()
            .setRole(role.told)
            .setName(Texts.sendable("messages", name))
            .setToolCallId(Texts.sendable("messages", toolCallId))
            .setReasoningContent(Texts.sendable("messages", reasoning));
    content.ifPresent(text -> made.setContent(Texts.sendable("messages", text)));
    for (ToolCall call : toolCalls) {
      made.addToolCallsBuilder()
          .setId(Texts.sendable("messages", call.id()))
          .setName(Texts.sendable("messages", call.name()))
          .setArgumentsJson(Texts.sendable("messages", call.arguments()));
    }
    if (!parts.isEmpty()) {
      ContentParts.Builder several = ContentParts.newBuilder();
      parts.forEach(
          text ->
              several.addParts(ContentPart.newBuilder().setText(Texts.sendable("messages", text))));
      made.setContentParts(several);
    }
    return made.build();
  }
}
