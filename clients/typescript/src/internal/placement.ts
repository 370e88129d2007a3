/**
 * Which server a request goes to: the one that has its prompt's beginning, unless it has more than its share to do.
 * docs/fleet.md states this exactly, for clients in all languages.
 *
 * @module
 */
import { createHash } from "node:crypto";

import { type ChatInput, type ChatMessage, ChatRole, type GenerationSpec } from "../gen/headrace/v1/generation_pb.js";

const BOUND = 1.25;
const HEAD_BYTES = 1024;
const HEAD_TOKENS = 256;
const CHAT_BYTES = 4096;
const LEAST_BYTES = 256;
const LEAST_TOKENS = 64;
const REMEMBERED = 4096;

/** The keys of a prompt. */
export interface PrefixKeys {
  /** Of what it is likely to share with other prompts; decides the order of servers. */
  readonly shared: Buffer;
  /** Of the conversation; what is remembered. The same as `shared` for other prompts. */
  readonly own: Buffer;
}

/** A server to choose. */
export interface Candidate {
  /** Its instance id, by which all clients know it. */
  readonly name: string;
  /** How many requests it has. */
  readonly load: number;
  /** How many it runs at a time; at least 1. */
  readonly capacity: number;
  /** When it was chosen last, as a number that grows; decides between equals. */
  readonly turn: number;
}

/** The keys of a request's prompt; undefined: it has no prefix that is worth a preference. */
export function prefixKeys(spec: GenerationSpec): PrefixKeys | undefined {
  if (spec.cache?.bypassPrefixCache) {
    return undefined;
  }
  const salt = Buffer.from(`${spec.cache?.salt ?? ""}\0`);
  switch (spec.input.case) {
    case "text": {
      const head = first(spec.input.value.text, HEAD_BYTES);
      return head.length < LEAST_BYTES ? undefined : same(digest(salt, head));
    }
    case "tokens": {
      const ids = spec.input.value.ids.slice(0, HEAD_TOKENS);
      if (ids.length < LEAST_TOKENS) {
        return undefined;
      }
      const head = Buffer.alloc(4 * ids.length);
      ids.forEach((id, index) => head.writeUInt32BE(id, 4 * index));
      return same(digest(salt, head));
    }
    case "chat":
      return chatKeys(salt, spec.input.value);
    default:
      return undefined;
  }
}

/** The servers in a key's order of preference. */
export function order(key: Buffer, names: Iterable<string>): string[] {
  const ranked = [...names].map((name) => ({ name, rank: digest(key, Buffer.from(name)) }));
  ranked.sort((a, b) => Buffer.compare(b.rank, a.rank) || (a.name < b.name ? 1 : -1));
  return ranked.map(({ name }) => name);
}

/** Chooses servers, and remembers where prefixes went. */
export class Placement {
  readonly #homes = new Map<string, string>();

  /** The name of the server for a request; there is at least one candidate, and no two have the same name. */
  choose(keys: PrefixKeys | undefined, candidates: readonly Candidate[]): string {
    if (keys === undefined) {
      return leastLoaded(candidates).name;
    }
    const own = keys.own.toString("hex");
    const chosen = this.#withinBounds(keys.shared, this.#homes.get(own), candidates);
    this.#homes.delete(own); // the last one is the youngest
    this.#homes.set(own, chosen);
    if (this.#homes.size > REMEMBERED) {
      for (const oldest of this.#homes.keys()) {
        this.#homes.delete(oldest);
        break;
      }
    }
    return chosen;
  }

  #withinBounds(shared: Buffer, home: string | undefined, candidates: readonly Candidate[]): string {
    const byName = new Map(candidates.map((one) => [one.name, one]));
    const total = candidates.reduce((sum, one) => sum + one.load, 1);
    const room = candidates.reduce((sum, one) => sum + one.capacity, 0);
    const someoneIsFree = candidates.some((one) => one.load < one.capacity);
    const preferred = order(shared, byName.keys());
    for (const name of home === undefined ? preferred : [home, ...preferred]) {
      const one = byName.get(name);
      if (one === undefined) {
        continue;
      }
      const bound = Math.ceil((BOUND * total * one.capacity) / room) + 1;
      // A prefix is not worth a wait where another server would begin at once.
      if (one.load < bound && (one.load < one.capacity || !someoneIsFree)) {
        return name;
      }
    }
    return leastLoaded(candidates).name;
  }
}

function leastLoaded(candidates: readonly Candidate[]): Candidate {
  return candidates.reduce((best, one) => {
    const difference = one.load / one.capacity - best.load / best.capacity;
    return difference < 0 || (difference === 0 && one.turn < best.turn) ? one : best;
  });
}

/**
 * The instructions (tools and leading system messages) are what conversations share; with the first message after them
 * they are the conversation.
 */
function chatKeys(salt: Buffer, chat: ChatInput): PrefixKeys {
  const tools = chat.tools.map(
    (tool) => `${tool.definitionJson}\0${tool.name}\0${tool.description ?? ""}\0${tool.parametersJson}\0`,
  );
  const found = chat.messages.findIndex((one) => one.role !== ChatRole.SYSTEM && one.role !== ChatRole.DEVELOPER);
  const opening = found === -1 ? chat.messages.length : found;
  const instructions = chat.messages.slice(0, opening).map(messageText);
  const head = first([...tools, ...instructions].join(""), CHAT_BYTES);
  const next = first(
    chat.messages
      .slice(opening, opening + 1)
      .map(messageText)
      .join(""),
    CHAT_BYTES,
  );
  const own = digest(salt, head, Buffer.from("\0"), next);
  return { own, shared: head.length < LEAST_BYTES ? own : digest(salt, head) };
}

function messageText({ role, contentKind }: ChatMessage): string {
  let text = "";
  if (contentKind.case === "content") {
    text = contentKind.value;
  } else if (contentKind.case === "contentParts") {
    text = contentKind.value.parts.map(({ part }) => (part.case === "text" ? part.value : "")).join("");
  }
  return `${role}\0${text}\0`;
}

/** The first bytes of a text. A character has at least as many bytes as UTF-16 units; two more if it is cut in half. */
function first(text: string, bytes: number): Buffer {
  return Buffer.from(text.slice(0, bytes + 2)).subarray(0, bytes);
}

function digest(...data: Buffer[]): Buffer {
  const hash = createHash("sha256");
  for (const one of data) {
    hash.update(one);
  }
  return hash.digest().subarray(0, 8);
}

function same(key: Buffer): PrefixKeys {
  return { shared: key, own: key };
}
