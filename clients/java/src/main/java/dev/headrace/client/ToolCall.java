package dev.headrace.client;

/**
 * A call of a tool that the assistant made.
 *
 * @param id what the answer repeats
 * @param name the tool's name; it need not be one of the request's
 * @param arguments the text of a JSON object, as the model wrote it; it may be cut where the output
 *     ended
 */
public record ToolCall(String id, String name, String arguments) {}
