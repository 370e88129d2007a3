package dev.headrace.client;

/**
 * One refused field of a request.
 *
 * @param field its path in the message, such as {@code spec.sampling.top_p}
 * @param description what to change
 */
public record FieldViolation(String field, String description) {}
