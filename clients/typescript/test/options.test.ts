import assert from "node:assert/strict";
import { test } from "node:test";

import { create, toJson } from "@bufbuild/protobuf";
import { GenerationSpecSchema, InvalidArgumentError } from "@headrace/client";
import { GenerateRequestSchema } from "@headrace/client/contract";

import { withCapabilities } from "#lib/capabilities.js";
import { buildSpec, type GenerationOptions } from "#lib/options.js";

const spec = (options: GenerationOptions) => toJson(GenerationSpecSchema, buildSpec("x", options));

test("options are where the contract has them, and those that are left out are absent", () => {
  assert.deepEqual(spec({}), { text: { text: "x" } });
  const given: GenerationOptions = {
    temperature: 0,
    topK: 5,
    seed: 2n ** 63n - 1n,
    logitBias: { 7: -1.5 },
    maxTokens: 0,
    stop: "end",
    logprobs: 0,
    delivery: "final",
    regex: "a+",
    flexibleWhitespace: true,
    priority: -3,
    timeLimitMs: 1500,
    cacheSalt: "s",
    truncatePromptTo: 9,
    truncationSide: "right",
    labels: { team: "a" },
    n: 2,
    addSpecialTokens: false,
    prediction: "y",
  };
  assert.deepEqual(spec(given), {
    text: { text: "x", addSpecialTokens: false },
    sampling: { temperature: 0, topK: 5, seed: "9223372036854775807", logitBias: { 7: -1.5 } },
    stop: { maxTokens: 0, stopStrings: ["end"] },
    output: { logprobs: 0, delivery: "DELIVERY_FINAL" },
    structuredOutput: { regex: "a+", flexibleWhitespace: true },
    scheduling: { priority: -3, timeLimit: "1.500s" },
    cache: { salt: "s" },
    truncation: { maxPromptTokens: 9, side: "TRUNCATION_SIDE_RIGHT" },
    labels: [{ name: "team", value: "a" }],
    n: 2,
    prediction: { text: "y" },
  });
  assert.deepEqual(spec({ prediction: [3, 4] }), { text: { text: "x" }, prediction: { tokens: { ids: [3, 4] } } });
});

test("a conversation with tools", () => {
  const made = buildSpec(
    [
      { role: "user", content: [{ type: "text", text: "How high?" }] },
      { role: "assistant", content: null, toolCalls: [{ id: "c1", name: "f", arguments: '{"b": 1, "a": 2}' }] },
      { role: "tool", toolCallId: "c1", content: "3 m" },
    ],
    { tools: [{ name: "f", parameters: { type: "object" } }], toolChoice: "required", templateArguments: { x: false } },
  );
  assert.deepEqual(toJson(GenerationSpecSchema, made), {
    chat: {
      messages: [
        { role: "CHAT_ROLE_USER", contentParts: { parts: [{ text: "How high?" }] } },
        { role: "CHAT_ROLE_ASSISTANT", toolCalls: [{ id: "c1", name: "f", argumentsJson: '{"b": 1, "a": 2}' }] },
        { role: "CHAT_ROLE_TOOL", content: "3 m", toolCallId: "c1" },
      ],
      tools: [{ name: "f", parametersJson: '{"type":"object"}' }],
      toolChoice: { mode: "TOOL_CHOICE_MODE_REQUIRED" },
      templateArgumentsJson: '{"x":false}',
    },
  });
});

test("a choice of auto is absent, unless something asks to be held", () => {
  const choice = (options: GenerationOptions) => {
    const { input } = buildSpec([{ role: "user", content: "x" }], options);
    return input.case === "chat" ? input.value.toolChoice : undefined;
  };
  assert.equal(choice({ toolChoice: "auto", tools: [{ name: "f" }] }), undefined);
  const strict = { type: "function", function: { name: "f", strict: true } } as const;
  assert.notEqual(choice({ tools: [strict] }), undefined);
  assert.equal(choice({ parallelToolCalls: false })?.parallelCalls, false);
});

for (const [name, value, told] of [
  ["maxTokens", -1, "a whole number from 0"],
  ["maxTokens", 1.5, "a whole number from 0"],
  ["maxTokens", "7", "a whole number from 0"],
  ["temperature", Number.NaN, "a number is needed"],
  ["seed", 2 ** 60, "a safe integer"],
  ["seed", 2n ** 63n, "below 2^63"],
  ["echo", 1, "true or false"],
  ["bannedTokenIds", [2 ** 32], "4294967295"],
  ["stop", [3], "text is needed"],
  ["delivery", "later", "stream, final"],
  ["timeLimitMs", -1, "no length of time"],
  ["prediction", 3, "an array of token ids is needed"],
  ["tools", [], "belongs to a prompt of messages"],
  ["maxtokens", 3, "no such option"],
] as const) {
  test(`${name}: ${String(value)} is refused`, () => {
    assert.throws(
      () => buildSpec("x", { [name]: value } as GenerationOptions),
      (error: InvalidArgumentError) => {
        assert.ok(error instanceof InvalidArgumentError);
        assert.equal(error.fields[0]?.field, name);
        assert.ok(error.message.includes(told), error.message);
        assert.deepEqual([error.reason, error.fromServer], ["", false]);
        return true;
      },
    );
  });
}

test("what cannot be sent is refused", () => {
  assert.throws(() => buildSpec("half a pair: \ud83d"), { message: /surrogate/ });
  assert.throws(() => buildSpec([]), { message: /is empty/ });
  assert.throws(() => buildSpec([{ role: "robot" } as never]), { message: /robot is not one of/ });
  assert.throws(() => buildSpec([{ role: "user", text: "x" } as never]), { message: /unknown members text/ });
  assert.throws(() => buildSpec("x", { regex: "a", grammar: "b" }), { message: /cannot be combined with regex/ });
});

test("capabilities are those of what is set, and what the user asked for besides", () => {
  const needed = (request: ReturnType<typeof buildSpec>, besides: string[] = []) =>
    withCapabilities(
      GenerateRequestSchema,
      create(GenerateRequestSchema, { spec: request, requiredCapabilities: besides }),
    ).requiredCapabilities;
  assert.deepEqual(needed(buildSpec("x")), []);
  assert.deepEqual(needed(buildSpec("x", { priority: 1, jsonObject: true })), ["priorities", "structured_output"]);
  assert.deepEqual(needed(buildSpec("x", { structuralTag: {} })), ["structural_tag", "structured_output"]);
  const chat = buildSpec(
    [
      {
        role: "assistant",
        content: [{ type: "text", text: "x" }],
        toolCalls: [{ id: "", name: "f", arguments: "{}" }],
      },
    ],
    { tools: [{ name: "f" }], toolChoice: "none", maxReasoningTokens: 1 },
  );
  assert.deepEqual(needed(chat, ["zeta", "chat"]), [
    "chat",
    "content_parts",
    "reasoning_budget",
    "tool_choice",
    "tools",
    "zeta",
  ]);
});
