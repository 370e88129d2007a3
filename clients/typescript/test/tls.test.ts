import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { mkdtempSync, readFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { test } from "node:test";

import { Client, UnavailableError } from "@headrace/client";
import { FinishReason } from "@headrace/client/contract";

import { ScriptedServer } from "./server.js";

function hasOpenssl(): boolean {
  try {
    execFileSync("openssl", ["version"]);
    return true;
  } catch {
    return false;
  }
}

const folder = mkdtempSync(join(tmpdir(), "headrace-tls-"));
const file = (name: string) => join(folder, name);

/** A certificate and its key; signed by another one, or by itself. */
function certificate(name: string, signer?: string): void {
  const signed = signer === undefined ? [] : ["-CA", file(`${signer}.pem`), "-CAkey", file(`${signer}.key`)];
  const leaf = signer === undefined ? [] : ["-addext", "basicConstraints=critical,CA:FALSE"];
  execFileSync(
    "openssl",
    [
      ...["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2"],
      ...["-keyout", file(`${name}.key`), "-out", file(`${name}.pem`), "-subj", `/CN=${name}`],
      ...["-addext", "subjectAltName=DNS:localhost,DNS:other.example,IP:127.0.0.1", ...signed, ...leaf],
    ],
    { stdio: "ignore" },
  );
}

const generation = { generate: () => ({ choices: [{ text: "safe", finished: { reason: FinishReason.STOP } }] }) };

test("TLS by an authority, with and without a client's certificate", { skip: !hasOpenssl() }, async () => {
  certificate("ca");
  certificate("server", "ca");
  certificate("own", "ca");
  const [ca, cert, key] = ["ca.pem", "server.pem", "server.key"].map((name) => readFileSync(file(name)));
  const keys = { ca: ca!, cert: cert!, key: key! };
  await using server = await ScriptedServer.start(generation, {
    tls: { ...keys, requestCert: true, rejectUnauthorized: true },
  });
  const files = { caFile: file("ca.pem"), certFile: file("own.pem"), keyFile: file("own.key") };
  for (const host of ["localhost", "127.0.0.1"]) {
    await using client = new Client(`${host}:${server.port}`, { tls: files, token: "secret" });
    assert.equal((await client.generate("x")).text, "safe");
  }
  await using named = new Client(server.target, { tls: { ...files, serverName: "other.example" } });
  assert.equal((await named.generate("x")).text, "safe");

  const { certFile: _cert, keyFile: _key, ...without } = files;
  for (const tls of [without, { ...files, caFile: file("own.pem") }, { ...files, serverName: "wrong.example" }, true]) {
    await using client = new Client(server.target, { tls, retries: 0 });
    await assert.rejects(client.generate("x"), UnavailableError);
  }
});
