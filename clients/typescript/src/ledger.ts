import { codeName, describeStatus, detailLines } from "./failure.js";
import type { Status } from "./gen/google/rpc/status_pb.js";
import { type Finished, FinishReason, type ResultEvent, type Usage } from "./gen/headrace/v1/generation_pb.js";
import type { CommandRejection, StreamResultResponse } from "./gen/headrace/v1/generation_service_pb.js";

/** What has been told about one request. */
interface Request {
  /** Counted from 1, in the order of sending. It is the command_id of the request's add. */
  readonly number: number;
  readonly id: string;
  lastSeq: bigint;
  text: string;
  readonly tokenIds: number[];
  /** At its end, if it finished. */
  finished?: Finished;
  /** At its end, if it was refused or failed. */
  failure?: Status | undefined;
  /** At its end, unless it was refused. */
  usage?: Usage | undefined;
  ended: boolean;
}

/**
 * Knows the session's requests: it gives them their names, takes their events, prints what they say, and checks that
 * they are complete.
 */
export class Ledger {
  readonly #requests: Request[] = [];
  readonly #byId = new Map<string, Request>();
  /** By the number that the server gave it. */
  readonly #byNumber = new Map<number, Request>();
  /** What was refused, failed or broke the contract. */
  #faults = 0;

  constructor(
    private readonly idPrefix: string,
    private readonly json: boolean,
  ) {}

  /** Makes a new request and returns the command_id of its add, and its id. */
  add(): { commandId: bigint; requestId: string } {
    const number = this.#requests.length + 1;
    const request: Request = {
      number,
      id: `${this.idPrefix}-${number}`,
      lastSeq: 0n,
      text: "",
      tokenIds: [],
      ended: false,
    };
    this.#requests.push(request);
    this.#byId.set(request.id, request);
    return { commandId: BigInt(number), requestId: request.id };
  }

  /** The ids of the requests that have not ended. */
  live(): string[] {
    return this.#requests.filter((request) => !request.ended).map((request) => request.id);
  }

  /** Enters one message of the server. Answers to `cancel` are not looked at: the end of the request tells. */
  take(response: StreamResultResponse): void {
    for (const rejection of response.rejections) {
      this.#takeRejection(rejection);
    }
    for (const event of response.events) {
      this.#takeEvent(event);
    }
  }

  #takeRejection(rejection: CommandRejection): void {
    const request = this.#requests[Number(rejection.commandId) - 1];
    if (request === undefined) {
      this.#fault(`a command was refused: ${describeStatus(rejection.status)}`);
      return;
    }
    if (request.lastSeq > 0n || request.ended) {
      this.#fault(`[${request.number}] refused after it was accepted, or twice`);
      return;
    }
    request.failure = rejection.status;
    request.ended = true;
    this.#fault(`[${request.number}] refused: ${describeStatus(rejection.status)}`);
  }

  #takeEvent({ requestNumber, seq, choiceIndex, event }: ResultEvent): void {
    if (event.case === "accepted") {
      // The id is said once; the number stands in every event.
      const accepted = this.#byId.get(event.value.requestId);
      if (accepted !== undefined) {
        this.#byNumber.set(requestNumber, accepted);
      }
    }
    const request = this.#byNumber.get(requestNumber);
    if (request === undefined) {
      this.#fault(`an event of number ${requestNumber}, which is no request of this session`);
      return;
    }
    const { number, lastSeq } = request;
    if (request.ended) {
      this.#fault(`[${number}] event ${seq} after its end`);
      return;
    }
    if (seq <= lastSeq) {
      this.#fault(`[${number}] event ${seq} came again`);
      return;
    }
    if (seq > lastSeq + 1n) {
      this.#fault(`[${number}] event ${seq} follows ${lastSeq}: some are missing`);
    }
    request.lastSeq = seq;
    if (choiceIndex !== 0) {
      // Its tokens belong to another text, and its end is not the request's.
      this.#fault(`[${number}] event ${seq} is of choice ${choiceIndex}, one choice was asked for`);
      return;
    }

    switch (event.case) {
      case "delta": {
        const { tokenIds, text } = event.value;
        for (const id of tokenIds) {
          request.tokenIds.push(id);
        }
        request.text += text;
        if (text !== "") {
          this.#print(`[${number}] ${JSON.stringify(text)}`);
        }
        break;
      }
      case "finished": {
        const { reason, usage } = event.value;
        request.finished = event.value;
        request.usage = usage;
        request.ended = true;
        this.#print(
          `[${number}] finished: ${reasonName(reason)} (${usage?.promptTokens ?? 0} prompt tokens, ` +
            `${usage?.cachedTokens ?? 0} of them cached; ${usage?.completionTokens ?? 0} tokens)`,
        );
        break;
      }
      case "failed": {
        request.failure = event.value.status;
        request.usage = event.value.usage;
        request.ended = true;
        this.#fault(`[${number}] failed: ${describeStatus(event.value.status)}`);
        break;
      }
    }
  }

  /**
   * To be called when the stream has ended. Checks that every request has, prints the JSON lines if they are wanted,
   * and returns whether all went well.
   */
  close(): boolean {
    for (const request of this.#requests) {
      if (!request.ended) {
        this.#fault(`[${request.number}] the stream ended before the request`);
      }
      if (this.json) {
        console.log(JSON.stringify(resultLine(request)));
      }
    }
    return this.#faults === 0;
  }

  /** Writes a line of progress. */
  #print(line: string): void {
    if (!this.json) {
      console.log(line);
    }
  }

  /** Writes a line about what went wrong outside of the requests, and remembers it. */
  broken(line: string): void {
    this.#fault(line);
  }

  /** Writes a line about what went wrong, and remembers that something did. */
  #fault(line: string): void {
    this.#faults += 1;
    console.error(line);
  }
}

/** A request's line with --json. */
function resultLine({ id, text, tokenIds, finished, failure, usage }: Request): object {
  return {
    request_id: id,
    text,
    token_ids: tokenIds,
    finish_reason: finished === undefined ? null : reasonName(finished.reason),
    usage:
      usage === undefined
        ? null
        : {
            prompt_tokens: usage.promptTokens,
            cached_tokens: usage.cachedTokens,
            completion_tokens: usage.completionTokens,
          },
    ...(failure === undefined
      ? {}
      : { error: { code: codeName(failure.code), message: failure.message, details: detailLines(failure.details) } }),
  };
}

/** A reason as the contract's prose calls it, such as LENGTH, and a number for one that this program does not know. */
function reasonName(reason: FinishReason): string {
  return FinishReason[reason] ?? String(reason);
}
