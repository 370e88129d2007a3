package dev.headrace.client;

/**
 * A function that the model may call. It has a name, or a definition.
 *
 * @param name the function's name; empty, if there is a definition
 * @param description what it does, for the model to read; may be empty
 * @param parameters the text of a JSON Schema; may be empty
 * @param definition the whole tool as the template is to see it, the text of a JSON object; empty:
 *     the other fields are
 */
public record Tool(String name, String description, String parameters, String definition) {

  /**
   * Makes a tool.
   *
   * @param name as above
   * @param description as above
   * @param parameters as above
   * @param definition as above
   * @throws HeadraceException if a value cannot be used
   */
  public Tool {
    if (!definition.isEmpty()
        && !(name.isEmpty() && description.isEmpty() && parameters.isEmpty())) {
      throw HeadraceException.invalid("tools", "a tool with a definition has nothing else");
    }
  }

  /**
   * Makes a tool.
   *
   * @param name the function's name
   * @param description what it does, for the model to read
   * @param parameters the text of a JSON Schema
   */
  public Tool(String name, String description, String parameters) {
    this(name, description, parameters, "");
  }

  dev.headrace.v1.Tool told() {
    dev.headrace.v1.Tool.Builder made =
        dev.headrace.v1.Tool.newBuilder()
            .setName(Texts.sendable("tools", name))
            .setParametersJson(Texts.sendable("tools", parameters))
            .setDefinitionJson(Texts.sendable("tools", definition));
    if (!description.isEmpty()) {
      made.setDescription(Texts.sendable("tools", description));
    }
    return made.build();
  }
}
