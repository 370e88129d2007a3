package dev.headrace.conformance;

import com.google.gson.JsonArray;
import com.google.gson.JsonElement;
import com.google.gson.JsonNull;
import com.google.gson.JsonObject;
import com.google.gson.JsonPrimitive;
import com.google.protobuf.ByteString;
import dev.headrace.client.Choice;
import dev.headrace.client.Chunk;
import dev.headrace.client.Format;
import dev.headrace.client.HeadraceException;
import dev.headrace.client.Message;
import dev.headrace.client.Outcome;
import dev.headrace.client.Request;
import dev.headrace.client.Result;
import dev.headrace.client.Token;
import dev.headrace.client.Tool;
import dev.headrace.client.ToolCall;
import dev.headrace.client.ToolChoice;
import dev.headrace.client.Usage;
import dev.headrace.v1.Adapter;
import dev.headrace.v1.LoadAdapterResponse;
import java.time.Duration;
import java.util.ArrayList;
import java.util.Base64;
import java.util.List;
import java.util.Locale;
import java.util.Optional;

/** The values of the driver's protocol, and what the library has for them. */
final class Forms {
  private Forms() {}

  // ---- what the runner says
  // ----------------------------------------------------------------------

  static boolean has(JsonObject in, String name) {
    return in.has(name) && !in.get(name).isJsonNull();
  }

  static String text(JsonObject in, String name) {
    return has(in, name) ? in.get(name).getAsString() : "";
  }

  static boolean flag(JsonObject in, String name) {
    return has(in, name) && in.get(name).getAsBoolean();
  }

  static List<String> texts(JsonObject in, String name) {
    List<String> found = new ArrayList<>();
    if (has(in, name)) {
      in.getAsJsonArray(name).forEach(one -> found.add(one.getAsString()));
    }
    return found;
  }

  static List<JsonObject> objects(JsonObject in, String name) {
    List<JsonObject> found = new ArrayList<>();
    if (has(in, name)) {
      in.getAsJsonArray(name).forEach(one -> found.add(one.getAsJsonObject()));
    }
    return found;
  }

  static Duration millis(JsonObject in, String name) {
    return has(in, name) ? Duration.ofMillis(in.get(name).getAsLong()) : Duration.ZERO;
  }

  /** A request as a user of the library writes it. */
  static Request request(JsonObject told) {
    Request.Builder made;
    if (has(told, "messages")) {
      made = Request.chat(objects(told, "messages").stream().map(Forms::message).toList());
    } else if (has(told, "token_ids")) {
      List<Long> ids = new ArrayList<>();
      told.getAsJsonArray("token_ids").forEach(id -> ids.add(id.getAsLong()));
      made = Request.tokens(ids);
    } else {
      made = Request.text(text(told, "text"));
    }
    if (has(told, "id")) {
      made.id(text(told, "id"));
    }
    if (has(told, "tools")) {
      made.tools(objects(told, "tools").stream().map(Forms::tool).toList());
    }
    String choice = text(told, "tool_choice");
    if (!choice.isEmpty() && !choice.equals("auto")) {
      made.toolChoice(new ToolChoice(ToolChoice.Mode.valueOf(choice.toUpperCase(Locale.ROOT))));
    }
    if (has(told, "max_tokens")) {
      made.maxTokens(told.get("max_tokens").getAsLong());
    }
    if (has(told, "n")) {
      made.n(told.get("n").getAsInt());
    }
    if (has(told, "logprobs")) {
      made.logprobs(told.get("logprobs").getAsLong());
    }
    if (has(told, "priority")) {
      made.priority(told.get("priority").getAsInt());
    }
    if (has(told, "max_reasoning_tokens")) {
      made.maxReasoningTokens(told.get("max_reasoning_tokens").getAsLong());
    }
    if (has(told, "seed")) {
      made.seed(
          Long.parseUnsignedLong(text(told, "seed"))); // above 2^63 - 1: refused by the library
    }
    if (has(told, "stop")) {
      made.stop(texts(told, "stop"));
    }
    if (has(told, "json_schema")) {
      made.format(Format.jsonSchema(text(told, "json_schema")));
    }
    if (has(told, "structural_tag")) {
      made.format(Format.structuralTag(text(told, "structural_tag")));
    }
    if (has(told, "time_limit_ms")) {
      made.timeLimit(millis(told, "time_limit_ms"));
    }
    if (has(told, "prediction")) {
      made.prediction(text(told, "prediction"));
    }
    if (has(told, "adapter")) {
      made.adapter(text(told, "adapter"));
    }
    return made.build();
  }

  private static Tool tool(JsonObject told) {
    return new Tool(text(told, "name"), text(told, "description"), text(told, "parameters"));
  }

  private static Message message(JsonObject told) {
    List<ToolCall> calls =
        objects(told, "tool_calls").stream()
            .map(
                call -> new ToolCall(text(call, "id"), text(call, "name"), text(call, "arguments")))
            .toList();
    return new Message(
        Message.Role.valueOf(text(told, "role").toUpperCase(Locale.ROOT)),
        has(told, "content") ? Optional.of(text(told, "content")) : Optional.empty(),
        List.of(),
        "",
        calls,
        text(told, "tool_call_id"),
        "");
  }

  // ---- what the library gave
  // ---------------------------------------------------------------------

  private static JsonPrimitive of(Number number) {
    return new JsonPrimitive(number);
  }

  static JsonElement chunk(Chunk chunk) {
    JsonObject told = new JsonObject();
    told.add("choice", of(chunk.choice()));
    told.addProperty("text", chunk.text());
    told.add("token_ids", numbers(chunk.tokenIds()));
    told.addProperty("reasoning", chunk.reasoning());
    JsonArray calls = new JsonArray();
    for (Chunk.ToolCallPart part : chunk.toolCalls()) {
      JsonObject one = call(part.id(), part.name(), part.arguments());
      one.add("index", of(part.index()));
      calls.add(one);
    }
    told.add("tool_calls", calls);
    told.add("tokens", tokens(chunk.tokens()));
    return told;
  }

  private static JsonArray numbers(List<Long> ids) {
    JsonArray told = new JsonArray();
    ids.forEach(told::add);
    return told;
  }

  private static JsonObject call(String id, String name, String arguments) {
    JsonObject told = new JsonObject();
    told.addProperty("id", id);
    told.addProperty("name", name);
    told.addProperty("arguments", arguments);
    return told;
  }

  private static JsonArray tokens(List<Token> tokens) {
    JsonArray told = new JsonArray();
    for (Token token : tokens) {
      JsonObject one = token(token.id(), token.text(), token.bytes(), token.logprob());
      one.add("rank", token.rank().isPresent() ? of(token.rank().getAsLong()) : JsonNull.INSTANCE);
      JsonArray candidates = new JsonArray();
      for (Token.Candidate other : token.candidates()) {
        candidates.add(
            token(other.id(), other.text(), other.bytes(), Optional.of(other.logprob())));
      }
      one.add("candidates", candidates);
      told.add(one);
    }
    return told;
  }

  private static JsonObject token(long id, String text, ByteString bytes, Optional<Float> logprob) {
    JsonObject told = new JsonObject();
    told.add("id", of(id));
    told.addProperty("text", text);
    told.addProperty("bytes", Base64.getEncoder().encodeToString(bytes.toByteArray()));
    told.addProperty(
        "logprob",
        logprob.map(it -> String.format("%08x", Float.floatToRawIntBits(it))).orElse(null));
    return told;
  }

  private static JsonObject usage(Usage usage) {
    JsonObject told = new JsonObject();
    told.add("prompt_tokens", of(usage.promptTokens()));
    told.add("cached_tokens", of(usage.cachedTokens()));
    told.add("completion_tokens", of(usage.completionTokens()));
    told.add("reasoning_tokens", of(usage.reasoningTokens()));
    told.add("draft_tokens", of(usage.draftTokens()));
    told.add("accepted_draft_tokens", of(usage.acceptedDraftTokens()));
    told.add("prediction_draft_tokens", of(usage.predictionDraftTokens()));
    told.add("accepted_prediction_draft_tokens", of(usage.acceptedPredictionDraftTokens()));
    return told;
  }

  static JsonObject result(Result result) {
    JsonObject told = new JsonObject();
    told.addProperty("request_id", result.requestId());
    told.addProperty(
        "seed",
        result.accepted().filter(accepted -> accepted.seed().isPresent()).isPresent()
            ? Long.toString(result.accepted().get().seed().getAsLong())
            : null);
    told.addProperty(
        "adapter_digest", result.accepted().map(accepted -> accepted.adapterDigest()).orElse(null));
    told.add("usage", usage(result.usage()));
    JsonArray choices = new JsonArray();
    result.choices().forEach(one -> choices.add(choice(one)));
    told.add("choices", choices);
    return told;
  }

  private static JsonObject choice(Choice choice) {
    JsonObject told = new JsonObject();
    told.add("index", of(choice.index()));
    told.addProperty("text", choice.text());
    told.add("token_ids", numbers(choice.tokenIds()));
    told.addProperty("finish_reason", choice.finishReason().name().toLowerCase(Locale.ROOT));
    told.addProperty("stop_string", choice.stopString().orElse(null));
    told.add(
        "stop_token_id",
        choice.stopTokenId().isPresent()
            ? of(choice.stopTokenId().getAsLong())
            : JsonNull.INSTANCE);
    told.addProperty("reasoning", choice.reasoning());
    JsonArray calls = new JsonArray();
    choice.toolCalls().forEach(one -> calls.add(call(one.id(), one.name(), one.arguments())));
    told.add("tool_calls", calls);
    told.add("tokens", tokens(choice.tokens()));
    told.add("usage", usage(choice.usage()));
    return told;
  }

  static JsonObject adapter(Adapter adapter) {
    String state = adapter.getState().name();
    JsonObject told = new JsonObject();
    told.addProperty("name", adapter.getName());
    told.addProperty("digest", adapter.getDigest());
    told.add("rank", of(adapter.getRank()));
    told.add("bytes", of(adapter.getSizeBytes()));
    told.add("modules", of(adapter.getModules()));
    told.addProperty("state", state.substring("ADAPTER_STATE_".length()).toLowerCase(Locale.ROOT));
    told.addProperty("pinned", adapter.getPinned());
    told.add("live", of(adapter.getLiveRequests()));
    told.addProperty("base_model", adapter.getBaseModel());
    return told;
  }

  static JsonObject loaded(LoadAdapterResponse answer) {
    JsonObject told = new JsonObject();
    told.add("adapter", adapter(answer.getAdapter()));
    JsonArray evicted = new JsonArray();
    answer.getEvictedList().forEach(evicted::add);
    told.add("evicted", evicted);
    return told;
  }

  static JsonObject error(Throwable thrown) {
    JsonObject told = new JsonObject();
    if (!(thrown instanceof HeadraceException failure)) {
      told.addProperty("foreign", String.valueOf(thrown));
      return told;
    }
    told.addProperty("code", failure.code().name());
    told.addProperty("reason", failure.reason());
    told.addProperty("message", failure.getMessage());
    JsonObject metadata = new JsonObject();
    failure.metadata().forEach(metadata::addProperty);
    told.add("metadata", metadata);
    JsonArray fields = new JsonArray();
    failure
        .fields()
        .forEach(
            one -> {
              JsonObject field = new JsonObject();
              field.addProperty("field", one.field());
              field.addProperty("description", one.description());
              fields.add(field);
            });
    told.add("fields", fields);
    told.add(
        "retry_after_ms",
        failure
            .retryAfter()
            .<JsonElement>map(delay -> of(delay.toMillis()))
            .orElse(JsonNull.INSTANCE));
    told.addProperty("request_id", failure.requestId());
    told.add(
        "partial", failure.partial().<JsonElement>map(Forms::result).orElse(JsonNull.INSTANCE));
    return told;
  }

  static JsonObject outcome(Outcome outcome) {
    JsonObject told = new JsonObject();
    told.add("index", of(outcome.index()));
    outcome.result().ifPresent(result -> told.add("result", result(result)));
    outcome.error().ifPresent(error -> told.add("error", error(error)));
    return told;
  }
}
