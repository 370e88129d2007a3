/**
 * Turns the events of one request into chunks and, at the end, its result.
 *
 * Events are numbered 1, 2, 3 and so on within a request. A fold takes each number once and in order: a missing, repeated
 * or misplaced event makes the request fail with `ProtocolError`, so that output is never silently wrong.
 *
 * @module
 */
import { type HeadraceError, errorFromStatus, ProtocolError } from "./errors.js";
import type { Delta, Finished, ResultEvent } from "./gen/headrace/v1/generation_pb.js";
import {
  type Accepted,
  acceptedFrom,
  type Choice,
  choiceFrom,
  type Chunk,
  chunkFrom,
  type PromptInfo,
  promptFrom,
  Result,
} from "./results.js";

/** The state of one request, from its first event to its terminal one. */
export class Fold {
  /** All output so far, in the order of its arrival. */
  chunks: Chunk[] = [];
  accepted: Accepted | undefined;
  prompt: PromptInfo | undefined;
  /** Why the request failed, once it has. */
  error: HeadraceError | undefined;
  /** Whether the request has ended, successfully or not. */
  done = false;
  /** The number of the event that comes next. */
  nextSeq: bigint;
  #finished = new Map<number, Finished>();
  #tokenCounts = new Map<number, number>();
  #endWasTold = false; // by its events: nothing follows

  /**
   * @param requestId - the request; empty takes the id of the Accepted event.
   * @param n - how many choices it has; it has ended when all of them have. 0: not known yet, the Accepted event says it.
   * @param fromSeq - the number of the first event that will come.
   */
  constructor(
    public requestId: string,
    public n = 1,
    fromSeq = 1n,
  ) {
    this.nextSeq = fromSeq < 1n ? 1n : fromSeq;
  }

  /** Processes the next event. Faults are in `error`. */
  add(event: ResultEvent): void {
    const problem = this.#problem(event);
    if (problem !== undefined) {
      this.fail(new ProtocolError(`the server broke the contract: ${problem}`));
      return;
    }
    this.nextSeq += 1n;
    const { event: what, choiceIndex } = event;
    switch (what.case) {
      case "delta":
        this.#delta(event.seq, choiceIndex, what.value);
        break;
      case "accepted":
        this.accepted = acceptedFrom(this.requestId, what.value);
        this.n = what.value.n || this.n || 1;
        break;
      case "prompt":
        this.prompt = promptFrom(what.value);
        break;
      case "finished":
        this.#finished.set(choiceIndex, what.value);
        this.done = this.#endWasTold = this.n > 0 && this.#finished.size >= this.n;
        break;
      case "failed":
        if (what.value.status === undefined) {
          this.fail(new ProtocolError("the server broke the contract: a failure without a status"));
        } else {
          this.fail(errorFromStatus(what.value.status));
        }
        this.#endWasTold = true;
        break;
      default: // an event that is newer than this client is counted and passed over
    }
  }

  /** Ends the request with an error; the first one stays. */
  fail(error: HeadraceError): void {
    if (this.error === undefined) {
      error.requestId ||= this.requestId;
      error.partial ??= this.partial();
      this.error = error;
    }
    this.done = true;
  }

  /**
   * A fold that continues where this one was interrupted, with all its output. If the request's end had arrived, it has
   * that too, and there is nothing to continue.
   */
  reopened(): Fold {
    const fold = new Fold(this.requestId, this.n, this.nextSeq);
    fold.chunks = [...this.chunks];
    fold.accepted = this.accepted;
    fold.prompt = this.prompt;
    fold.#finished = new Map(this.#finished);
    fold.#tokenCounts = new Map(this.#tokenCounts);
    if (this.#endWasTold) {
      fold.done = fold.#endWasTold = true;
      fold.error = this.error;
    }
    return fold;
  }

  /** Forgets all events: the request is sent again, and they begin anew. */
  restart(): void {
    this.nextSeq = 1n;
    this.chunks = [];
    this.accepted = this.prompt = this.error = undefined;
    this.done = this.#endWasTold = false;
    this.#finished.clear();
    this.#tokenCounts.clear();
  }

  /**
   * The whole result.
   *
   * @throws HeadraceError - the request failed.
   */
  result(): Result {
    if (this.error !== undefined) {
      throw this.error;
    }
    return this.partial();
  }

  /** The output so far; a choice that has not ended has the reason `unknown`. */
  partial(): Result {
    const indexes = new Set([...this.#finished.keys(), ...this.#tokenCounts.keys()]);
    for (let index = 0; index < Math.max(this.n, 1); index++) {
      indexes.add(index);
    }
    const choices = [...indexes].sort((a, b) => a - b).map((index) => this.#choice(index));
    const usage = {
      promptTokens: Math.max(this.prompt?.promptTokens ?? 0, ...choices.map((one) => one.usage.promptTokens)),
      cachedTokens: Math.max(this.prompt?.cachedTokens ?? 0, ...choices.map((one) => one.usage.cachedTokens)),
      completionTokens: choices.reduce((sum, one) => sum + one.usage.completionTokens, 0),
      reasoningTokens: choices.reduce((sum, one) => sum + one.usage.reasoningTokens, 0),
      draftTokens: choices.reduce((sum, one) => sum + one.usage.draftTokens, 0),
      acceptedDraftTokens: choices.reduce((sum, one) => sum + one.usage.acceptedDraftTokens, 0),
      predictionDraftTokens: choices.reduce((sum, one) => sum + one.usage.predictionDraftTokens, 0),
      acceptedPredictionDraftTokens: choices.reduce((sum, one) => sum + one.usage.acceptedPredictionDraftTokens, 0),
    };
    return new Result(this.requestId, choices, usage, this.prompt, this.accepted);
  }

  #choice(index: number): Choice {
    const own = this.n === 1 ? this.chunks : this.chunks.filter((chunk) => chunk.choiceIndex === index);
    return choiceFrom(index, own, this.#finished.get(index));
  }

  #problem({ event, seq, choiceIndex }: ResultEvent): string | undefined {
    if (event.case === "accepted") {
      this.requestId ||= event.value.requestId;
      if (event.value.requestId !== this.requestId) {
        return `"${event.value.requestId}" was accepted where "${this.requestId}" was due`;
      }
    }
    if (seq !== this.nextSeq) {
      return `event ${seq} came where ${this.nextSeq} was due`;
    }
    // A failure is the whole request's, whatever choices finished before.
    if (this.done || (event.case !== "failed" && this.#finished.has(choiceIndex))) {
      return `event ${seq} came after the end`;
    }
    if (this.n > 0 && choiceIndex >= this.n) {
      return `event ${seq} is of choice ${choiceIndex}, out of ${this.n}`;
    }
    return undefined;
  }

  #delta(seq: bigint, choiceIndex: number, delta: Delta): void {
    const offset = this.#tokenCounts.get(choiceIndex) ?? 0;
    const chunk = chunkFrom(this.requestId, seq, choiceIndex, offset, delta);
    this.#tokenCounts.set(choiceIndex, offset + chunk.tokenIds.length);
    this.chunks.push(chunk);
  }
}
