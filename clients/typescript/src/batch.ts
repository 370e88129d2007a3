/**
 * Many requests through a bounded window on one session: when each is sent, and in which order outcomes are given.
 *
 * @module
 */
import {
  AlreadyExistsError,
  HeadraceError,
  invalidArgument,
  ResourceExhaustedError,
  UnavailableError,
} from "./errors.js";
import type { GenerationSpec } from "./gen/headrace/v1/generation_pb.js";
import type { SessionRecord } from "./internal/session_core.js";
import type { SessionRouter } from "./internal/session_router.js";
import type { Prompt } from "./messages.js";
import { buildSpec, type GenerationOptions } from "./options.js";
import type { Result } from "./results.js";

const MOST_TRIES = 12;
const FIRST_DELAY_MS = 50;
const MOST_DELAY_MS = 5_000;
const ORDERED_AHEAD = 16; // with ordered: how many windows of outcomes may wait for an earlier one

/** A prompt with its own options, which override those of the batch. */
export interface BatchRequest {
  /** The prompt. */
  readonly prompt: Prompt;
  /** Its options. */
  readonly options?: GenerationOptions | undefined;
}

/** The outcome of one request of a batch. */
export type BatchOutcome =
  | {
      /** The request's place in the batch, from 0. */
      readonly index: number;
      /** Its result. */
      readonly result: Result;
      /** It has not failed. */
      readonly error?: undefined;
    }
  | {
      /** The request's place in the batch, from 0. */
      readonly index: number;
      /** Why it was refused or failed. */
      readonly error: HeadraceError;
      /** It has no result. */
      readonly result?: undefined;
    };

/** The options of a batch, and those of all its requests. */
export interface BatchOptions extends Omit<GenerationOptions, "requestId"> {
  /** How many requests may run or wait in the server at the same time; default 64. */
  readonly maxInFlight?: number | undefined;
  /** Whether outcomes come in the order of the requests instead of as they end. */
  readonly ordered?: boolean | undefined;
}

/** What may be run in a batch. */
export type BatchInput = Iterable<Prompt | BatchRequest> | AsyncIterable<Prompt | BatchRequest>;

interface Item {
  readonly index: number;
  readonly spec: GenerationSpec;
  tries: number;
}

/** Runs the requests, and gives their outcomes. */
export async function* runBatch(
  openSession: () => SessionRouter,
  requests: BatchInput,
  given: BatchOptions,
): AsyncGenerator<BatchOutcome, void, undefined> {
  const { maxInFlight = 64, ordered = false, ...options } = given;
  if (!Number.isInteger(maxInFlight) || maxInFlight < 1) {
    throw invalidArgument("maxInFlight", `is ${maxInFlight}; at least 1 is needed`);
  }
  if ("requestId" in options) {
    throw invalidArgument("requestId", "cannot be shared by a batch's requests");
  }
  const session = openSession();
  const window = new Window(session, requests, options, maxInFlight, ordered);
  try {
    while (!window.isFinished) {
      window.fill();
      yield* window.ready();
      if (!window.isFinished && !window.canFill) {
        await window.change();
      }
    }
    if (window.lost !== undefined) {
      throw window.lost;
    }
    await session.close(false);
  } finally {
    await window.end();
    await session.close(true);
  }
}

/** Which requests of a batch are in flight. */
class Window {
  /** Why the session ended before the batch. */
  lost: HeadraceError | undefined;
  readonly #source: Iterator<Prompt | BatchRequest> | AsyncIterator<Prompt | BatchRequest>;
  readonly #isAsync: boolean;
  readonly #outcomes = new Map<number, BatchOutcome>();
  readonly #again: Item[] = [];
  #arrived: (Prompt | BatchRequest)[] = [];
  #isReading = false;
  #isExhausted = false;
  #failure: { reason: unknown } | undefined;
  #inFlight = 0;
  #taken = 0;
  #given = 0;
  #notBefore = 0;
  #wake: (() => void) | undefined;

  constructor(
    private readonly session: SessionRouter,
    requests: BatchInput,
    private readonly options: GenerationOptions,
    private readonly maxInFlight: number,
    private readonly ordered: boolean,
  ) {
    this.#isAsync = Symbol.asyncIterator in requests;
    this.#source = Symbol.asyncIterator in requests ? requests[Symbol.asyncIterator]() : requests[Symbol.iterator]();
  }

  /** Whether all outcomes have been given. */
  get isFinished(): boolean {
    const isIdle = this.#inFlight === 0 && this.#again.length === 0 && this.#outcomes.size === 0;
    return this.#isExhausted && this.#arrived.length === 0 && isIdle;
  }

  /** Whether `fill` would send something now. */
  get canFill(): boolean {
    const hasMore = this.#again.length > 0 || this.#arrived.length > 0 || (!this.#isExhausted && !this.#isReading);
    return hasMore && this.#hasRoom && performance.now() >= this.#notBefore;
  }

  get #hasRoom(): boolean {
    const isFar = this.ordered && this.#outcomes.size >= ORDERED_AHEAD * this.maxInFlight;
    return this.#inFlight < this.maxInFlight && !isFar;
  }

  /** Sends what there is room for. */
  fill(): void {
    while (this.canFill) {
      const item = this.#again.shift() ?? this.#take();
      if (item === undefined) {
        if (this.#isReading || this.#isExhausted) {
          return;
        }
        continue;
      }
      this.#send(item);
    }
  }

  /** The outcomes that may be given now, each once. Throws what the requests' iterable threw. */
  *ready(): Generator<BatchOutcome> {
    if (this.#failure !== undefined) {
      throw this.#failure.reason;
    }
    if (!this.ordered) {
      for (const [index, outcome] of [...this.#outcomes]) {
        this.#outcomes.delete(index);
        yield outcome;
      }
      return;
    }
    for (;;) {
      const next = this.#outcomes.get(this.#given);
      if (next === undefined) {
        return;
      }
      this.#outcomes.delete(this.#given);
      this.#given += 1;
      yield next;
    }
  }

  /** Waits until something has ended or arrived, or may be sent again. */
  async change(): Promise<void> {
    const wait = this.#notBefore - performance.now();
    let timer: NodeJS.Timeout | undefined;
    if (this.#hasOutcome() || this.#failure !== undefined) {
      return;
    }
    await new Promise<void>((resolve) => {
      this.#wake = resolve;
      timer = wait > 0 && this.#hasRoom ? setTimeout(resolve, Math.ceil(wait)) : undefined;
    });
    clearTimeout(timer);
    this.#wake = undefined;
  }

  /** Lets go of the requests' iterable. */
  async end(): Promise<void> {
    if (!this.#isExhausted && !this.#isReading) {
      await this.#source.return?.();
    }
  }

  #hasOutcome(): boolean {
    return this.ordered ? this.#outcomes.has(this.#given) : this.#outcomes.size > 0;
  }

  #take(): Item | undefined {
    if (this.#arrived.length === 0) {
      this.#readNext();
    }
    const [given] = this.#arrived.splice(0, 1);
    if (given === undefined) {
      return undefined;
    }
    const index = this.#taken;
    this.#taken += 1;
    const { prompt, options } = isBatchRequest(given) ? given : { prompt: given, options: {} };
    try {
      return { index, spec: buildSpec(prompt, { ...this.options, ...options }), tries: 1 };
    } catch (error) {
      this.#outcome(index, error instanceof HeadraceError ? error : invalidArgument("request", String(error)));
      return undefined;
    }
  }

  #readNext(): void {
    if (!this.#isAsync) {
      const { done, value } = (this.#source as Iterator<Prompt | BatchRequest>).next();
      this.#isExhausted = done ?? false;
      this.#arrived = done ? [] : [value];
      return;
    }
    this.#isReading = true;
    const arrived = ({ done, value }: IteratorResult<Prompt | BatchRequest>): void => {
      this.#isReading = false;
      this.#isExhausted ||= done ?? false;
      if (!done && this.lost === undefined) {
        this.#arrived.push(value);
      }
      this.#wake?.();
    };
    const failed = (reason: unknown): void => {
      this.#isReading = false;
      this.#isExhausted = true;
      this.#failure = { reason };
      this.#wake?.();
    };
    (this.#source as AsyncIterator<Prompt | BatchRequest>).next().then(arrived, failed);
  }

  #send(item: Item): void {
    let record: SessionRecord;
    try {
      record = this.session.add(item.spec);
    } catch (error) {
      if (!(error instanceof HeadraceError)) {
        throw error;
      }
      this.#outcome(item.index, error);
      if (!(error instanceof AlreadyExistsError)) {
        this.#stop(error);
      }
      return;
    }
    this.#inFlight += 1;
    this.session.payAll(record);
    this.#watch(item, record);
  }

  #watch(item: Item, record: SessionRecord): void {
    if (record.fold.done) {
      this.#ended(item, record);
      this.#wake?.();
    } else {
      record.onChange(() => this.#watch(item, record));
    }
  }

  #ended(item: Item, record: SessionRecord): void {
    this.#inFlight -= 1;
    const { error } = record.fold;
    const canWait = error instanceof ResourceExhaustedError || error instanceof UnavailableError;
    if (canWait && record.refused && item.tries < MOST_TRIES && this.lost === undefined) {
      const delay = error.retryAfterMs ?? Math.min(FIRST_DELAY_MS * 2 ** (item.tries - 1), MOST_DELAY_MS);
      item.tries += 1;
      this.#notBefore = Math.max(this.#notBefore, performance.now() + delay);
      this.#again.push(item);
      return;
    }
    this.#outcome(item.index, error ?? record.fold.partial());
  }

  /** Sends no more; requests that waited to be sent again end with the error. */
  #stop(error: HeadraceError): void {
    this.lost = error;
    this.#isExhausted = true;
    this.#arrived = [];
    for (const { index } of this.#again.splice(0)) {
      this.#outcome(index, error);
    }
  }

  #outcome(index: number, found: Result | HeadraceError): void {
    this.#outcomes.set(index, found instanceof HeadraceError ? { index, error: found } : { index, result: found });
  }
}

function isBatchRequest(given: Prompt | BatchRequest): given is BatchRequest {
  return typeof given === "object" && "prompt" in given && !("$typeName" in given);
}
