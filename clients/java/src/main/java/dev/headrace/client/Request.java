package dev.headrace.client;

import dev.headrace.v1.ChatInput;
import dev.headrace.v1.Delivery;
import dev.headrace.v1.GenerationSpec;
import dev.headrace.v1.Label;
import dev.headrace.v1.OutputOptions;
import dev.headrace.v1.SamplingOptions;
import dev.headrace.v1.StopOptions;
import dev.headrace.v1.TextInput;
import dev.headrace.v1.TokenInput;
import dev.headrace.v1.TruncationOptions;
import dev.headrace.v1.TruncationSide;
import java.security.SecureRandom;
import java.time.Duration;
import java.util.Collection;
import java.util.HexFormat;
import java.util.List;

/**
 * What to generate. What is not set is not sent, and the server's default holds: the model's own
 * for sampling. The server checks what values may be; here a value is refused only if the
 * contract's message cannot have it.
 *
 * <p>A request may be used for several calls. Without an id each of them is a request of its own.
 */
public final class Request {
  private static final SecureRandom RANDOM = new SecureRandom();

  private final GenerationSpec spec;

  private Request(GenerationSpec spec) {
    this.spec = spec;
  }

  /**
   * A request whose prompt is text.
   *
   * @param prompt the prompt
   * @return what the other options are set on
   */
  public static Builder text(String prompt) {
    Builder made = new Builder(GenerationSpec.newBuilder());
    made.spec.setText(TextInput.newBuilder().setText(Texts.sendable("text", prompt)));
    return made;
  }

  /**
   * A request whose prompt is token ids, used as they are.
   *
   * @param ids unsigned numbers of 32 bits
   * @return what the other options are set on
   */
  public static Builder tokens(Collection<? extends Number> ids) {
    Builder made = new Builder(GenerationSpec.newBuilder());
    made.spec.setTokens(TokenInput.newBuilder().addAllIds(ids("token_ids", ids)));
    return made;
  }

  /**
   * A request whose prompt is a conversation.
   *
   * @param messages the oldest first
   * @return what the other options are set on
   */
  public static Builder chat(List<Message> messages) {
    Builder made = new Builder(GenerationSpec.newBuilder());
    made.spec.setChat(
        ChatInput.newBuilder().addAllMessages(messages.stream().map(Message::told).toList()));
    return made;
  }

  /**
   * A request whose prompt is a conversation.
   *
   * @param messages the oldest first
   * @return what the other options are set on
   */
  public static Builder chat(Message... messages) {
    return chat(List.of(messages));
  }

  /**
   * A request as the contract's message has it.
   *
   * @param spec the message
   * @return what more options are set on
   */
  public static Builder of(GenerationSpec spec) {
    return new Builder(spec.toBuilder());
  }

  /**
   * The contract's message.
   *
   * @return without an id, if none was set
   */
  public GenerationSpec spec() {
    return spec;
  }

  /**
   * What to change for another request.
   *
   * @return with all that this one has
   */
  public Builder toBuilder() {
    return new Builder(spec.toBuilder());
  }

  /** The message to send: with an id, an unguessable one if none was set. */
  GenerationSpec toSend() {
    if (!spec.getRequestId().isEmpty()) {
      return spec;
    }
    byte[] random = new byte[16];
    RANDOM.nextBytes(random);
    return spec.toBuilder().setRequestId(HexFormat.of().formatHex(random)).build();
  }

  /** How many choices a request has. */
  static int choicesOf(GenerationSpec spec) {
    return spec.hasN() ? spec.getN() : 1;
  }

  private static final long MOST = 0xFFFF_FFFFL;

  private static int count(String field, long value) {
    if (value < 0 || value > MOST) {
      throw HeadraceException.invalid(field, value + " is not from 0 to " + MOST);
    }
    return (int) value;
  }

  private static List<Integer> ids(String field, Collection<? extends Number> ids) {
    return ids.stream().map(id -> count(field, id.longValue())).toList();
  }

  /** Sets the options of a request. It is used by one thread. */
  public static final class Builder {
    private final GenerationSpec.Builder spec;

    private Builder(GenerationSpec.Builder spec) {
      this.spec = spec;
    }

    /**
     * Makes the request.
     *
     * @return with all that was set until now
     */
    public Request build() {
      return new Request(spec.build());
    }

    private SamplingOptions.Builder sampling() {
      return spec.getSamplingBuilder();
    }

    private StopOptions.Builder stop() {
      return spec.getStopBuilder();
    }

    private OutputOptions.Builder output() {
      return spec.getOutputBuilder();
    }

    private ChatInput.Builder chat(String field) {
      if (!spec.hasChat()) {
        throw HeadraceException.invalid(field, "belongs to a prompt that is a conversation");
      }
      return spec.getChatBuilder();
    }

    /**
     * The caller's id for the request. Without it an unguessable one is made for each call.
     *
     * @param id 1 to 128 characters of [A-Za-z0-9._:/-]
     * @return this
     */
    public Builder id(String id) {
      spec.setRequestId(Texts.sendable("request_id", id));
      return this;
    }

    /**
     * The model that is meant. A server that does not have it refuses the request.
     *
     * @param name its name or an alias
     * @return this
     */
    public Builder model(String name) {
      spec.setModel(Texts.sendable("model", name));
      return this;
    }

    /**
     * An adapter to apply, such as a LoRA.
     *
     * @param name its name
     * @return this
     */
    public Builder adapter(String name) {
      spec.setAdapter(Texts.sendable("adapter", name));
      return this;
    }

    /**
     * A label for accounting: it is in the server's logs and traces.
     *
     * @param name its name
     * @param value its value
     * @return this
     */
    public Builder label(String name, String value) {
      spec.addLabels(
          Label.newBuilder()
              .setName(Texts.sendable("labels", name))
              .setValue(Texts.sendable("labels", value)));
      return this;
    }

    /**
     * How many independent continuations to make.
     *
     * @param count one, if it is not set
     * @return this
     */
    public Builder n(int count) {
      spec.setN(count("n", count));
      return this;
    }

    /**
     * Whether the tokenizer adds its special tokens to a prompt that is text.
     *
     * @param adds it does, if this is not set
     * @return this
     */
    public Builder addSpecialTokens(boolean adds) {
      if (!spec.hasText()) {
        throw HeadraceException.invalid("add_special_tokens", "belongs to a prompt that is text");
      }
      spec.getTextBuilder().setAddSpecialTokens(adds);
      return this;
    }

    /**
     * One more message of a conversation, the newest.
     *
     * @param message the message
     * @return this
     */
    public Builder message(Message message) {
      chat("messages").addMessages(message.told());
      return this;
    }

    /**
     * Functions that the model may call in its reply to a conversation.
     *
     * @param tools the functions
     * @return this
     */
    public Builder tools(List<Tool> tools) {
      ChatInput.Builder chat = chat("tools");
      tools.forEach(tool -> chat.addTools(tool.told()));
      return this;
    }

    /**
     * Holds the reply to the tools and their schemas.
     *
     * @param choice which tools it calls
     * @return this
     */
    public Builder toolChoice(ToolChoice choice) {
      chat("tool_choice").setToolChoice(choice.told());
      return this;
    }

    /**
     * Whether the conversation ends with the opening of an assistant's turn.
     *
     * @param adds it does, if this is not set
     * @return this
     */
    public Builder addGenerationPrompt(boolean adds) {
      chat("add_generation_prompt").setAddGenerationPrompt(adds);
      return this;
    }

    /**
     * Leaves the last message open, to be continued by the model.
     *
     * @return this
     */
    public Builder continueFinalMessage() {
      chat("continue_final_message").setContinueFinalMessage(true);
      return this;
    }

    /**
     * More named values for the chat template.
     *
     * @param json the text of a JSON object
     * @return this
     */
    public Builder templateArguments(String json) {
      chat("template_arguments")
          .setTemplateArgumentsJson(Texts.sendable("template_arguments", json));
      return this;
    }

    /**
     * Cuts a longer prompt to so many tokens: the oldest go. Without it, it is refused.
     *
     * @param tokens how many stay
     * @return this
     */
    public Builder truncatePromptTo(long tokens) {
      spec.getTruncationBuilder().setMaxPromptTokens(count("truncate_prompt_to", tokens));
      return this;
    }

    /**
     * Cuts a longer prompt to so many tokens: the newest go.
     *
     * @param tokens how many stay
     * @return this
     */
    public Builder truncatePromptRightTo(long tokens) {
      spec.setTruncation(
          TruncationOptions.newBuilder()
              .setMaxPromptTokens(count("truncate_prompt_to", tokens))
              .setSide(TruncationSide.TRUNCATION_SIDE_RIGHT));
      return this;
    }

    /**
     * Divides the logits; 0 is greedy.
     *
     * @param temperature the divisor
     * @return this
     */
    public Builder temperature(double temperature) {
      sampling().setTemperature((float) temperature);
      return this;
    }

    /**
     * Keeps the k most likely tokens.
     *
     * @param k how many; 0: all
     * @return this
     */
    public Builder topK(long k) {
      sampling().setTopK(count("top_k", k));
      return this;
    }

    /**
     * Keeps the fewest tokens whose probabilities reach this sum.
     *
     * @param p the sum
     * @return this
     */
    public Builder topP(double p) {
      sampling().setTopP((float) p);
      return this;
    }

    /**
     * Keeps tokens at least this likely, relative to the most likely one.
     *
     * @param p the share
     * @return this
     */
    public Builder minP(double p) {
      sampling().setMinP((float) p);
      return this;
    }

    /**
     * Keeps the tokens of most typical surprise, up to this sum of probability.
     *
     * @param p the sum
     * @return this
     */
    public Builder typicalP(double p) {
      sampling().setTypicalP((float) p);
      return this;
    }

    /**
     * Divides the logits of tokens that were seen.
     *
     * @param penalty the divisor
     * @return this
     */
    public Builder repetitionPenalty(double penalty) {
      sampling().setRepetitionPenalty((float) penalty);
      return this;
    }

    /**
     * Is subtracted from the logits of tokens seen in the output.
     *
     * @param penalty how much
     * @return this
     */
    public Builder presencePenalty(double penalty) {
      sampling().setPresencePenalty((float) penalty);
      return this;
    }

    /**
     * Is subtracted for each time that a token was seen in the output.
     *
     * @param penalty how much
     * @return this
     */
    public Builder frequencyPenalty(double penalty) {
      sampling().setFrequencyPenalty((float) penalty);
      return this;
    }

    /**
     * No sequence of so many tokens occurs twice.
     *
     * @param size its length; 0: off
     * @return this
     */
    public Builder noRepeatNgramSize(long size) {
      sampling().setNoRepeatNgramSize(count("no_repeat_ngram_size", size));
      return this;
    }

    /**
     * Is added to the logit of a token.
     *
     * @param id the token's id, an unsigned number of 32 bits
     * @param bias how much
     * @return this
     */
    public Builder logitBias(long id, double bias) {
      sampling().putLogitBias(count("logit_bias", id), (float) bias);
      return this;
    }

    /**
     * The only token ids that may be generated.
     *
     * @param ids unsigned numbers of 32 bits
     * @return this
     */
    public Builder allowedTokenIds(Collection<? extends Number> ids) {
      sampling().addAllAllowedTokenIds(ids("allowed_token_ids", ids));
      return this;
    }

    /**
     * Token ids that are never generated.
     *
     * @param ids unsigned numbers of 32 bits
     * @return this
     */
    public Builder bannedTokenIds(Collection<? extends Number> ids) {
      sampling().addAllBannedTokenIds(ids("banned_token_ids", ids));
      return this;
    }

    /**
     * Makes the draws repeatable.
     *
     * @param seed not negative
     * @return this
     */
    public Builder seed(long seed) {
      if (seed < 0) {
        throw HeadraceException.invalid("seed", seed + " is not from 0 to 2^63 - 1");
      }
      sampling().setSeed(seed);
      return this;
    }

    /**
     * The most tokens to generate.
     *
     * @param tokens 0: the prompt is processed only
     * @return this
     */
    public Builder maxTokens(long tokens) {
      stop().setMaxTokens(count("max_tokens", tokens));
      return this;
    }

    /**
     * Until so many tokens are generated, nothing stops the output.
     *
     * @param tokens how many
     * @return this
     */
    public Builder minTokens(long tokens) {
      stop().setMinTokens(count("min_tokens", tokens));
      return this;
    }

    /**
     * Strings that end the output where they first appear.
     *
     * @param strings the strings
     * @return this
     */
    public Builder stop(Collection<String> strings) {
      strings.forEach(one -> stop().addStopStrings(Texts.sendable("stop", one)));
      return this;
    }

    /**
     * Token ids that end the output.
     *
     * @param ids unsigned numbers of 32 bits
     * @return this
     */
    public Builder stopTokenIds(Collection<? extends Number> ids) {
      stop().addAllStopTokenIds(ids("stop_token_ids", ids));
      return this;
    }

    /**
     * Replace the model's own end-of-sequence ids.
     *
     * @param ids unsigned numbers of 32 bits
     * @return this
     */
    public Builder eosTokenIds(Collection<? extends Number> ids) {
      stop().addAllEosTokenIds(ids("eos_token_ids", ids));
      return this;
    }

    /**
     * Treats end-of-sequence tokens like any other.
     *
     * @return this
     */
    public Builder ignoreEos() {
      stop().setIgnoreEos(true);
      return this;
    }

    /**
     * Leaves the text that ended the output in it.
     *
     * @return this
     */
    public Builder includeStop() {
      stop().setIncludeStop(true);
      return this;
    }

    /**
     * In the reply to a conversation, reasoning is ended after so many tokens.
     *
     * @param tokens how many
     * @return this
     */
    public Builder maxReasoningTokens(long tokens) {
      stop().setMaxReasoningTokens(count("max_reasoning_tokens", tokens));
      return this;
    }

    /**
     * A form that the output must have.
     *
     * @param format the form
     * @return this
     */
    public Builder format(Format format) {
      spec.setStructuredOutput(format.told());
      return this;
    }

    /**
     * Has the output come in one piece at the end.
     *
     * @return this
     */
    public Builder finalOnly() {
      output().setDelivery(Delivery.DELIVERY_FINAL);
      return this;
    }

    /**
     * A chunk is sent once it has so many tokens.
     *
     * @param tokens how many; without this every step's are sent
     * @return this
     */
    public Builder minTokensPerDelta(long tokens) {
      output().setMinTokensPerDelta(count("min_tokens_per_delta", tokens));
      return this;
    }

    /**
     * Asks for each token's log-probability and those of so many candidates.
     *
     * @param candidates how many; 0: the token's own only
     * @return this
     */
    public Builder logprobs(long candidates) {
      output().setLogprobs(count("logprobs", candidates));
      return this;
    }

    /**
     * Asks for the same of the prompt's tokens.
     *
     * @param candidates how many; 0: the token's own only
     * @return this
     */
    public Builder promptLogprobs(long candidates) {
      output().setPromptLogprobs(count("prompt_logprobs", candidates));
      return this;
    }

    /**
     * Token ids whose log-probabilities follow the candidates of each token.
     *
     * @param ids unsigned numbers of 32 bits
     * @return this
     */
    public Builder logprobTokenIds(Collection<? extends Number> ids) {
      output().addAllLogprobTokenIds(ids("logprob_token_ids", ids));
      return this;
    }

    /**
     * Has the text start with the prompt's.
     *
     * @return this
     */
    public Builder echo() {
      output().setEcho(true);
      return this;
    }

    /**
     * Asks for each token's text and bytes.
     *
     * @return this
     */
    public Builder tokenDetails() {
      output().setTokenDetails(true);
      return this;
    }

    /**
     * Asks for the time of each token.
     *
     * @return this
     */
    public Builder recordTimestamps() {
      output().setRecordTimestamps(true);
      return this;
    }

    /**
     * Whether special tokens are left out of the text.
     *
     * @param skips they are, if this is not set
     * @return this
     */
    public Builder skipSpecialTokens(boolean skips) {
      output().setSkipSpecialTokens(skips);
      return this;
    }

    /**
     * Asks for token ids alone.
     *
     * @return this
     */
    public Builder omitText() {
      output().setOmitText(true);
      return this;
    }

    /**
     * Has reasoning and tool calls stay in the text of the reply, as the model wrote them.
     *
     * @return this
     */
    public Builder rawText() {
      output().setRawText(true);
      return this;
    }

    /**
     * Requests of a higher number run first.
     *
     * @param priority the number; 0, if it is not set
     * @return this
     */
    public Builder priority(int priority) {
      spec.getSchedulingBuilder().setPriority(priority);
      return this;
    }

    /**
     * How long the request may take on the server; then it ends with {@link
     * FinishReason#TIME_LIMIT} and its output so far.
     *
     * @param limit the server's limit, if it is not set
     * @return this
     */
    public Builder timeLimit(Duration limit) {
      spec.getSchedulingBuilder().setTimeLimit(Durations.to(limit));
      return this;
    }

    /**
     * Cached prefixes are shared only among requests with the same salt.
     *
     * @param salt any text
     * @return this
     */
    public Builder cacheSalt(String salt) {
      spec.getCacheBuilder().setSalt(Texts.sendable("cache_salt", salt));
      return this;
    }

    /**
     * What the output is expected to be like, such as a file that is to be edited. It changes no
     * token: where the server speculates and the output goes as expected, several tokens come at a
     * time.
     *
     * @param text the expected output
     * @return this
     */
    public Builder prediction(String text) {
      spec.getPredictionBuilder().setText(Texts.sendable("prediction", text));
      return this;
    }

    /**
     * What the output is expected to be like, as token ids.
     *
     * @param ids unsigned numbers of 32 bits
     * @return this
     */
    public Builder prediction(Collection<? extends Number> ids) {
      spec.getPredictionBuilder()
          .setTokens(TokenInput.newBuilder().addAllIds(ids("prediction", ids)));
      return this;
    }

    /**
     * Neither uses cached prefixes nor caches this request's.
     *
     * @return this
     */
    public Builder bypassPrefixCache() {
      spec.getCacheBuilder().setBypassPrefixCache(true);
      return this;
    }
  }
}
