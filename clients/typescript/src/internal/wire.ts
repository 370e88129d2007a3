/**
 * One StreamResult call: commands go out as they come, messages come in and are told one after the other.
 *
 * @module
 */
import type { Connection } from "../connection.js";
import { errorFromCall, type HeadraceError } from "../errors.js";
import type { StreamResultRequest, StreamResultResponse } from "../gen/headrace/v1/generation_service_pb.js";

/** What a wire tells. */
export interface WireListener {
  /** A message came. */
  received(response: StreamResultResponse): void;
  /** The call has ended, once; undefined: in order. */
  lost(error: HeadraceError | undefined): void;
}

/** The commands of a call, as an async iterable that waits for more until it is ended. */
class Outgoing implements AsyncIterable<StreamResultRequest> {
  #queue: StreamResultRequest[] = [];
  #ended = false;
  #wake: (() => void) | undefined;

  push(commands: readonly StreamResultRequest[]): void {
    if (!this.#ended) {
      this.#queue.push(...commands);
      this.#wake?.();
    }
  }

  end(): void {
    this.#ended = true;
    this.#wake?.();
  }

  async *[Symbol.asyncIterator](): AsyncGenerator<StreamResultRequest> {
    for (;;) {
      const ready = this.#queue;
      this.#queue = [];
      yield* ready;
      if (this.#queue.length > 0) {
        continue;
      }
      if (this.#ended) {
        return;
      }
      await new Promise<void>((resolve) => {
        this.#wake = resolve;
      });
      this.#wake = undefined;
    }
  }
}

/** One call, which begins at once. */
export class Wire {
  /** Resolves when the call has ended and its end was told. */
  readonly ended: Promise<void>;
  readonly #outgoing = new Outgoing();
  readonly #abort = new AbortController();

  constructor(
    private readonly connection: Connection,
    private readonly listener: WireListener,
  ) {
    this.ended = this.#read();
  }

  /** Sends commands; `isLast`: and half-closes. */
  send(commands: readonly StreamResultRequest[], isLast: boolean): void {
    this.#outgoing.push(commands);
    if (isLast) {
      this.#outgoing.end();
    }
  }

  /** Cancels the call. */
  cancel(): void {
    this.#outgoing.end();
    this.#abort.abort();
  }

  async #read(): Promise<void> {
    let error: HeadraceError | undefined;
    try {
      const messages = this.connection.generation.streamResult(this.#outgoing, { signal: this.#abort.signal });
      for await (const message of messages) {
        this.listener.received(message);
      }
    } catch (failure) {
      error = errorFromCall(failure, { target: this.connection.target, signal: this.#abort.signal });
    }
    this.#outgoing.end();
    this.listener.lost(error);
  }
}
