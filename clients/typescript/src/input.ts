import type { Readable } from "node:stream";

/** The longest line of the standard input. */
const MAX_LINE_BYTES = 4 * 1024 * 1024;

const NEWLINE = 0x0a;

/**
 * The lines of an input that are not empty, without their ends. What cannot be sent is told to `broken` and left out:
 * a line that is not UTF-8, or one that is too long.
 */
export async function* readLines(input: Readable, broken: (line: string) => void): AsyncGenerator<string> {
  let number = 1;
  let kept: Buffer[] = [];
  let size = 0;
  const take = (): string => {
    const place = `line ${number}`;
    const line = size > MAX_LINE_BYTES ? undefined : decode(Buffer.concat(kept));
    if (size > MAX_LINE_BYTES) {
      broken(`session: ${place} has more than ${MAX_LINE_BYTES} bytes`);
    } else if (line === undefined) {
      broken(`session: ${place} is not UTF-8`);
    }
    number += 1;
    kept = [];
    size = 0;
    return line?.replace(/\r$/, "") ?? "";
  };
  const keep = (piece: Buffer): void => {
    size += piece.length;
    kept = size > MAX_LINE_BYTES ? [] : [...kept, piece];
  };

  try {
    for await (const chunk of input as AsyncIterable<Buffer>) {
      let start = 0;
      for (let end = chunk.indexOf(NEWLINE); end >= 0; end = chunk.indexOf(NEWLINE, start)) {
        keep(chunk.subarray(start, end));
        start = end + 1;
        const line = take();
        if (line !== "") {
          yield line;
        }
      }
      keep(chunk.subarray(start));
    }
  } catch (error) {
    // Destroyed by this program, which wants no more of it, it ends early.
    if ((error as NodeJS.ErrnoException).code !== "ERR_STREAM_PREMATURE_CLOSE") {
      broken(`session: standard input: ${error instanceof Error ? error.message : error}`);
    }
    return;
  }
  const last = take();
  if (last !== "") {
    yield last;
  }
}

/** The text of these bytes; undefined if they are not UTF-8. */
function decode(bytes: Buffer): string | undefined {
  try {
    return new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(bytes);
  } catch {
    return undefined;
  }
}
