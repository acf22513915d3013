// One request by an official Node SDK, its retries at the defaults: a job as JSON on standard input, on standard
// output what the app would have seen.
//
//   job     {sdk, base_url, asked: the parameters, read: "whole" | "iterate" | "helper"}
//   prints  {attempts, shown: what was delivered, error: null | {name, bad_request, status, code, param, message, body}}

import { readFileSync } from "node:fs";

const job = JSON.parse(readFileSync(0, "utf8"));
const { default: Sdk } = await import(job.sdk);
let attempts = 0;
const client = new Sdk({
  baseURL: job.base_url,
  apiKey: "k",
  fetch: (...request) => {
    attempts += 1;
    return fetch(...request);
  },
});
const resource = job.sdk.includes("anthropic") ? client.messages : client.chat.completions;

// Where openai 4 keeps it.
const helper = (asked) => (resource.stream ? resource.stream(asked) : client.beta.chat.completions.stream(asked));

const shown = [];
let error = null;
try {
  if (job.read === "whole") {
    shown.push(await resource.create(job.asked));
  } else {
    const stream =
      job.read === "helper" ? helper(job.asked) : await resource.create({ ...job.asked, stream: true });
    for await (const event of stream) shown.push(structuredClone(event));
  }
} catch (raised) {
  error = {
    name: raised.constructor.name,
    api_error: raised instanceof Sdk.APIError,
    bad_request: raised instanceof Sdk.BadRequestError,
    status: raised.status ?? null,
    code: raised.code ?? null,
    param: raised.param ?? null,
    message: raised.message,
    body: raised.error ?? null,
  };
}
console.log(JSON.stringify({ attempts, shown, error }));
