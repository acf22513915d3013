"""A provider that lives on this machine: Chat Completions, Messages, a little of Responses, and faults on demand.

For tests, for the demo, and for anybody who wants to see what an SDK does with a broken stream. It decides by
code of its own and imports nothing else of Turngate, so that it can disagree with the proxy in front of it.

    async with Simulator({"steps": [{"fault": {"cut_at_byte": 300}}]}) as simulator:
        client = AsyncOpenAI(base_url=simulator.url + "/v1", api_key="any")

`POST …/chat/completions`, `POST …/messages`, `POST …/responses` and `GET …/models` are answered whatever
stands before them; a WebSocket is refused with 426, anything else is a 404. Of Responses there is what an agent
needs: function tools, and the whole conversation in every request. Credentials are neither asked for nor kept.
Everything is deterministic: ids count requests, and the clock in the answers stands still.

**Without a scenario** it plays a model that likes tools. A turn that ends in text gets a call of the first
declared tool (of those that the text names, if it names any; all at once where parallel calls are allowed),
with arguments made from the tool's schema. A turn that ends in tool results gets text that quotes them.
Without tools it echoes.

**It refuses** what the providers refuse, in their words, mostly with status 400: undecodable bodies, parameters
and messages of another shape than documented, and sequences that do not hold together. What depends on the model
is asked of its name, what depends on version and betas of the headers. A doubtful request passes; so does what
only the provider can know, as whether a signature is its own.

**A scenario** is a JSON object. Unknown keys are errors, and an error names its key.

    description   what the scenario shows
    refusals      false: a lenient provider that takes any sequence (default true; a refused request uses up
                  no step)
    server        whose refusals and errors: "openai" (default; Messages: Anthropic), "azure", "deepseek",
                  "mistral", "vllm", "ollama"
    steps         list; a request takes the first step that matches it and is not used up, else the default
                  behaviour

A step, all keys optional:

    when          which requests: dialect ("chat", "messages", "responses"), stream (true, false), model,
                  contains (text in the last message). All that are given must hold; {} matches everything
    times         how many requests the step serves; default: 1 without `when`, no limit with it
    answer        what is said, see below; absent: the default behaviour
    delay_s       seconds of silence before the head of the answer (0)
    interval_s    seconds between the events of a stream (0)
    fault         one of those below

Faults; byte counts are those of the body before chunked framing:

    {"cut_at_byte": N, "how": "eof"}       N bytes arrive, then the connection ends without a last chunk
    {"cut_at_byte": N, "how": "reset"}     the same with a TCP reset
    {"cut_at_byte": N, "clean_end": true}  N bytes and a proper HTTP end: only the stream is cut short
    {"stall_at_byte": N}                   N bytes, then silence until the client goes
    {"error_event_after": K}               K events, an error event of the dialect, a proper HTTP end; a JSON
                                           answer becomes that error as an HTTP status

An answer is either content

    text          one string (streamed word by word) or a list of strings (one delta each)
    calls         list of {"name", "arguments"}; arguments are an object, or a list of raw fragments, valid
                  JSON or not
    finish        finish_reason or stop_reason, sent as it stands; default: what fits the content

or an error

    error         {"status", "type", "message"} in the dialect's envelope

or raw text

    frames        list of strings, each sent as one chunk, as in the exchange lines of `turngate replay`

and to each of these

    headers       response headers to set, or to leave out with null
"""

from turngate.proxy.simulator.http import Received
from turngate.proxy.simulator.scenario import SCENARIOS, Scenario, ScenarioError
from turngate.proxy.simulator.server import Simulator

__all__ = ["SCENARIOS", "Received", "Scenario", "ScenarioError", "Simulator"]
