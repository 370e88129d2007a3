/**
 * Where the servers are: what a client's target names.
 *
 * A target is an address (`host:port`, `unix:/path`), a name whose addresses are servers of their own
 * (`dns:///host:port`), or several of these: an array, or one text with commas. One address is one server; everything
 * else is a fleet, whose servers the client chooses among itself.
 *
 * @module
 */
import { isIP } from "node:net";

import { invalidArgument } from "./errors.js";

/** The server that is meant if no target is given. */
export const DEFAULT_TARGET = "127.0.0.1:50051";
const DEFAULT_PORT = 50051;

/** One server's address. */
export interface Address {
  readonly kind: "tcp" | "unix";
  /** The host, or the socket's path. */
  readonly host: string;
  /** 0 for a socket. */
  readonly port: number;
  /** The name that its certificate has, where the address is what a name resolved to. */
  readonly serverName: string;
}

/** A name each of whose addresses is a server. */
export interface Name {
  readonly kind: "name";
  readonly host: string;
  readonly port: number;
}

/** What a part of a target names. */
export type Place = Address | Name;

/** What a target names, each place once. */
export function parseTargets(given: string | readonly string[]): Place[] {
  const texts = typeof given === "string" ? given.split(",") : given;
  const places = new Map(texts.map(parsePlace).map((place) => [textOf(place), place]));
  if (places.size === 0) {
    throw invalidArgument("target", "is empty; use host:port, dns:///host:port or unix:/path");
  }
  return [...places.values()];
}

/** A place as a user writes it; for an address it identifies the server. */
export function textOf(place: Place): string {
  if (place.kind === "unix") {
    return `unix:${place.host}`;
  }
  const host = place.host.includes(":") ? `[${place.host}]` : place.host;
  return place.kind === "name" ? `dns:///${host}:${place.port}` : `${host}:${place.port}`;
}

/** Whether a place is on this machine: a Unix socket or a loopback address. */
export function isLocal(place: Place): boolean {
  const { kind, host } = place;
  return kind === "unix" || host === "localhost" || host === "::1" || (isIP(host) === 4 && host.startsWith("127."));
}

function parsePlace(given: string): Place {
  const text = given.trim();
  if (/^(https?|grpcs?):\/\//.test(text)) {
    throw invalidArgument(
      "target",
      `"${text}" is a URL; use host:port, dns:///host:port or unix:/path, and ask for TLS if the server is encrypted`,
    );
  }
  const path = /^(?:unix:(?:\/\/(?=\/))?)?(?=[./])(.+)$/.exec(text)?.[1];
  if (path !== undefined) {
    return { kind: "unix", host: path, port: 0, serverName: "" };
  }
  const isName = text.startsWith("dns:///");
  const rest = isName ? text.slice("dns:///".length) : text.replace(/^ipv[46]:/, "");
  const found = /^(?:\[([0-9A-Fa-f:.%]+)\]|([^:[\]/]+))(?::(\d+))?$/.exec(rest);
  const host = found?.[1] ?? found?.[2];
  const port = Number(found?.[3] ?? DEFAULT_PORT);
  if (host === undefined || port < 1 || port > 65_535) {
    throw invalidArgument("target", `"${text}" is not host:port, dns:///host:port or unix:/path`);
  }
  return isName ? { kind: "name", host, port } : { kind: "tcp", host, port, serverName: "" };
}
