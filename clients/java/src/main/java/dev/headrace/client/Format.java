package dev.headrace.client;

import dev.headrace.v1.ChoiceFormat;
import dev.headrace.v1.JsonObjectFormat;
import dev.headrace.v1.StructuredOutput;
import java.util.List;

/** A form that the output must have. */
public final class Format {
  private final StructuredOutput told;

  private Format(StructuredOutput told) {
    this.told = told;
  }

  /**
   * A JSON value that satisfies a schema.
   *
   * @param schema the text of a JSON Schema
   * @return the format
   */
  public static Format jsonSchema(String schema) {
    return new Format(
        StructuredOutput.newBuilder().setJsonSchema(Texts.sendable("format", schema)).build());
  }

  /**
   * Any JSON object.
   *
   * @return the format
   */
  public static Format jsonObject() {
    return new Format(
        StructuredOutput.newBuilder().setJsonObject(JsonObjectFormat.getDefaultInstance()).build());
  }

  /**
   * Text that matches a regular expression as a whole.
   *
   * @param pattern the expression
   * @return the format
   */
  public static Format regex(String pattern) {
    return new Format(
        StructuredOutput.newBuilder().setRegex(Texts.sendable("format", pattern)).build());
  }

  /**
   * Text of a context-free grammar.
   *
   * @param grammar in Lark's syntax
   * @return the format
   */
  public static Format grammar(String grammar) {
    return new Format(
        StructuredOutput.newBuilder().setGrammar(Texts.sendable("format", grammar)).build());
  }

  /**
   * One of some strings.
   *
   * @param choices the strings
   * @return the format
   */
  public static Format oneOf(List<String> choices) {
    ChoiceFormat.Builder made = ChoiceFormat.newBuilder();
    choices.forEach(one -> made.addChoices(Texts.sendable("format", one)));
    return new Format(StructuredOutput.newBuilder().setChoice(made).build());
  }

  /**
   * Text made of parts, as a JSON object describes it.
   *
   * @param tag the text of the object, <code>{"type": "structural_tag", "format": …}</code>
   * @return the format
   */
  public static Format structuralTag(String tag) {
    return new Format(
        StructuredOutput.newBuilder().setStructuralTag(Texts.sendable("format", tag)).build());
  }

  /**
   * This format, with blanks and line ends in JSON as the model likes. By default it writes one
   * line.
   *
   * @return another format
   */
  public Format withFlexibleWhitespace() {
    return new Format(told.toBuilder().setFlexibleWhitespace(true).build());
  }

  StructuredOutput told() {
    return told;
  }
}
