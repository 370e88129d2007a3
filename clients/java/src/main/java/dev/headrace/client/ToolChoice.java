package dev.headrace.client;

import dev.headrace.v1.ToolChoiceMode;
import java.util.List;
import java.util.Optional;

/**
 * Which tools a reply calls. The model is held to it, whatever the mode: to these tools and their
 * schemas.
 *
 * @param mode whether the reply calls tools
 * @param names the only tools that may be called; none: all of the request's
 * @param parallel whether a reply may have several calls; empty: whether the model's format has
 *     that
 */
public record ToolChoice(Mode mode, List<String> names, Optional<Boolean> parallel) {

  /** Whether a reply calls tools. */
  public enum Mode {
    /** The model chooses. */
    AUTO(ToolChoiceMode.TOOL_CHOICE_MODE_AUTO),
    /** It calls none. */
    NONE(ToolChoiceMode.TOOL_CHOICE_MODE_NONE),
    /** It calls at least one, and says nothing else. */
    REQUIRED(ToolChoiceMode.TOOL_CHOICE_MODE_REQUIRED);

    private final ToolChoiceMode told;

    Mode(ToolChoiceMode told) {
      this.told = told;
    }
  }

  /**
   * Makes a choice.
   *
   * @param mode as above
   * @param names as above
   * @param parallel as above
   */
  public ToolChoice {
    names = List.copyOf(names);
  }

  /**
   * Makes a choice among all of the request's tools.
   *
   * @param mode whether the reply calls tools
   */
  public ToolChoice(Mode mode) {
    this(mode, List.of(), Optional.empty());
  }

  dev.headrace.v1.ToolChoice told() {
    dev.headrace.v1.ToolChoice.Builder made =
        dev.headrace.v1.ToolChoice.newBuilder().setMode(mode.told);
    names.forEach(name -> made.addToolNames(Texts.sendable("tool_choice", name)));
    parallel.ifPresent(made::setParallelCalls);
    return made.build();
  }
}
