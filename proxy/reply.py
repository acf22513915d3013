"""The answer's side of an exchange: what came from the provider, what of it the app gets, and how it ended.

Everything passes as it comes unless the scope is enforced. There a streamed answer goes through the gate, and a whole
JSON answer that may carry calls is judged before its first byte goes on.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Final

from turngate.adapters import answers, coding, sse
from turngate.adapters.dialect import Answer, Dialect, Trouble, Undecodable
from turngate.adapters.registry import CHAT
from turngate.proxy import wire
from turngate.proxy.app_side import App, Tunnel
from turngate.proxy.config import Limits, Timeouts
from turngate.proxy.record import Record
from turngate.proxy.rollout import RequestClass
from turngate.proxy.upstream import Broken, Head, Link
from turngate.proxy.wire import Framing
from turngate.proxy.witnesses import Witnesses
from turngate.telemetry.events import Witness
from turngate.validators.gate import Gate, HoldBudget
from turngate.validators.graph import MessageSequence
from turngate.validators.previews import Preview
from turngate.validators.rules import Reason
from turngate.validators.schemas import Declared
from turngate.validators.stream import Assembler, Call, Ending, Turn, TurnVerdict

ENDINGS: Final = {"eof": Ending.EOF, "bad_framing": Ending.EOF, "reset": Ending.RESET, "aborted": Ending.LEFT}
ENDED_WELL: Final = frozenset({Turn.COMMITTED, Turn.INCOMPLETE})

WATCHED_BYTES: Final = 8 * 1024
"""What a watched stream may leave unread, and so the memory it takes while it is silent."""

RETRACTED: Final = (
    "the provider's answer did not end well; drop what you have of it and send the request again"
)


def class_of(sequence: MessageSequence) -> RequestClass:
    """What a stage's promise about this request is about."""
    return RequestClass.TOOLS if sequence.uses_tools else RequestClass.TEXT


class Reply:
    """One answer on its way to the app. `dialect` and `sequence` are None for what is only relayed.

    `verdict` is what the answer came to, None where it was not judged; `keep_alive` whether the app's connection can
    carry another exchange. `declared` is what the answer's calls may be, `commit` asks whether calls that were held
    may go now; both None where nobody cares. `may_repeat`: the request may be sent once more; `unanswered`: it has to be,
    and the app has been told nothing.
    """

    __slots__ = (
        "_active_s",
        "_alive",
        "_app",
        "_gate",
        "_holds",
        "_limits",
        "_link",
        "_record",
        "_timeouts",
        "_verdict",
        "_watchdog",
        "_witnesses",
        "assembler",
        "commit",
        "declared",
        "dialect",
        "ended_by_us",
        "enforced",
        "keep_alive",
        "may_repeat",
        "sequence",
        "started",
        "unanswered",
    )

    def __init__(
        self, app: App, record: Record, limits: Limits, timeouts: Timeouts, holds: HoldBudget
    ) -> None:
        self.dialect: Dialect | None = None
        self.sequence: MessageSequence | None = None
        self.enforced = False
        self.keep_alive = True
        self.started = False
        self.ended_by_us: Ending | None = None
        self.may_repeat = False
        self.unanswered = False
        self.assembler: Assembler | None = None
        self.declared: Declared | None = None
        self.commit: Callable[[TurnVerdict], Awaitable[bool]] | None = None
        self._app = app
        self._record = record
        self._limits = limits
        self._timeouts = timeouts
        self._holds = holds
        self._link: Link | None = None
        self._gate: Gate | None = None
        self._verdict: TurnVerdict | None = None
        self._active_s = 0.0
        self._watchdog: asyncio.TimerHandle | None = None
        self._alive: asyncio.TimerHandle | None = None
        self._witnesses: Witnesses | None = None

    @property
    def verdict(self) -> TurnVerdict | None:
        return self._gate.verdict if self._gate is not None else self._verdict

    @property
    def preview(self) -> Preview | None:
        """The text of a streamed answer as the app was shown it."""
        return self._gate.preview if self._gate is not None else None

    @property
    def withheld_calls(self) -> Sequence[Call]:
        """The answer's calls that have not been given to the app as those of a whole turn."""
        calls = self.assembler.calls if self.assembler is not None else []
        return calls[self._gate.released_calls :] if self._gate is not None else calls

    def witnessed(self) -> list[tuple[Witness, str]]:
        """What the witnesses find wrong with the answer as the app got it."""
        self._app.told = None
        if self._witnesses is None:
            return []
        withheld = self._gate is not None and self._gate.withheld_bytes
        passed = self._record.outcome == "passed" and not self._app.gone and not withheld
        return list(self._witnesses.found(clean=self._app.ended, passed=passed))

    @property
    def held_bytes(self) -> int:
        """Bytes that wait in the gate now."""
        return self._gate.held_bytes if self._gate is not None else 0

    def give_up(self, ending: Ending) -> None:
        """Close the provider's side; what waits for it goes on with this ending."""
        if not self._app.gone:
            self.ended_by_us = ending
        if self._link is not None:
            self._link.abort()

    def close(self) -> None:
        """Nothing more will come."""
        for timer in (self._watchdog, self._alive):
            if timer is not None:
                timer.cancel()
        if self._gate is not None:
            self._gate.close()

    async def head(self, link: Link) -> Head | None:
        """The answer's head, or None where there is none: then the app has been told."""
        self._link = link
        if self.enforced:
            self._active_s = self._record.monotonic()
            self._watch_silence(self._timeouts.first_byte_s)
        try:
            head = await link.head()
        except Broken as broken:
            self._no_head(broken)
            return None
        self._active_s = self._record.monotonic()
        if self._watchdog is not None:
            self._watchdog.cancel()
            self._watch_silence(self._timeouts.idle_s)
        self._record.first_byte_s = self._active_s - self._record.started_s
        self._record.status = head.status
        return head

    async def receive(self, link: Link, head: Head) -> None:
        """Take the answer behind its head and give the app what may pass."""
        if self.dialect is not None and self.sequence is not None and 200 <= head.status < 300:
            plain = _encoding(head) == b"identity"
            self._witnesses = Witnesses(self.dialect.api, plain=plain, failed=self._record.failed)
            self._app.told = self._witnesses.told
        if self.sequence is None or self.dialect is None:
            await self._pass(link, head)
        elif not 200 <= head.status < 300:
            self._record.went_wrong("provider_error", _error_type(head.status))
            await self._pass_error(link, head)
        elif (head.get(b"content-type") or b"").startswith(b"text/event-stream"):
            await self._pass_stream(link, head, self.sequence, self.dialect)
        elif self.enforced and class_of(self.sequence) is RequestClass.TOOLS:
            await self._hold_whole(link, head, self.sequence, self.dialect)
        else:
            await self._watch_whole(link, head, self.sequence, self.dialect)

    async def tunnel(self, link: Link, head: Head) -> None:
        """The connection became another protocol's with a 101: raw bytes both ways from here on."""
        self.keep_alive = False
        self.start(head, Framing.NONE)
        upwards = asyncio.create_task(_pump(self._app.tunnel(), link))
        try:
            while data := await link.read():
                self._app.send(data)
                if self._app.slow:
                    await self._app.writable()
        except Broken as broken:
            if not self._app.gone:
                self._record.went_wrong("retracted", f"provider_{broken.kind}")
        upwards.cancel()
        with suppress(asyncio.CancelledError, Broken):
            await upwards

    def start(self, head: Head, framing: Framing) -> None:
        """Pass the answer's head on."""
        self.started = True
        close = framing is Framing.CLOSE or not self.keep_alive or not self._app.keeps_alive
        extra = [(b"x-turngate-operation", self._record.operation.encode())] if self.enforced else []
        # Whatever tools the provider ran for the request, it would run again.
        twice = self.enforced and head.status >= 400 and self._uses_tools
        self._app.start(
            wire.answer_bytes(head, framing, close=close, extra=extra, repeatable=not twice), framing
        )

    @property
    def _uses_tools(self) -> bool:
        return self.sequence is None or self.sequence.uses_tools

    def inform(self, head: Head) -> None:
        """Pass a 1xx answer on, as RFC 9110, 15.2 demands of whoever stands between."""
        self._app.inform(wire.answer_bytes(head, Framing.NONE, close=False))

    # The provider is silent, or ends too soon

    def _watch_silence(self, after_s: float) -> None:
        self._watchdog = asyncio.get_running_loop().call_later(after_s, self._silent)

    def _silent(self) -> None:
        """A limit may have passed; one timer serves the whole answer, so that a delta costs no timer."""
        limit_s = self._timeouts.idle_s if self.started else self._timeouts.first_byte_s
        # While the app does not read, the provider cannot write: that pause is not its own.
        silent_s = 0.0 if self._app.slow else self._record.monotonic() - self._active_s
        if silent_s >= limit_s:
            self.give_up(Ending.STALLED)
        else:
            self._watch_silence(limit_s - silent_s)

    def _no_head(self, broken: Broken) -> None:
        """The provider's side ended before an answer began. Whether it worked on the request, nobody knows."""
        if self._may_ask_again():
            return
        self.keep_alive = False
        if self._app.gone:
            return
        self._record.went_wrong("unknown", "provider_closed")
        if self.ended_by_us is Ending.STALLED:
            text = (
                "the provider sent nothing for longer than timeouts.first_byte_s; it may have run the request"
            )
            self.fail(504, Reason.STREAM_STALLED, text)
        elif self.enforced or self.ended_by_us is not None:
            text = f"the provider's connection ended before its answer ({broken.kind}); it may have run the request"
            self.fail(502, Reason.DISPATCH_UNKNOWN_OUTCOME, text)
        else:
            self._app.cut()  # the app's SDK acts as it would alone

    def _may_ask_again(self) -> bool:
        """The provider's connection broke, and the app has nothing of an answer."""
        self.unanswered = self.may_repeat and self.ended_by_us is None and not self._app.gone
        return self.unanswered

    def begin_again(self) -> None:
        """Wait for the answer to another attempt as if there had been none."""
        if self._watchdog is not None:
            self._watchdog.cancel()
        self._watchdog = None
        self.unanswered = self.may_repeat = False
        self._record.status = 0

    # Streams

    async def _pass_stream(self, link: Link, head: Head, sequence: MessageSequence, dialect: Dialect) -> None:
        """A streamed answer through the gate: held where enforced, watched elsewhere."""
        parser = dialect.open_stream(sequence)
        encoding = _encoding(head)
        plain = encoding == b"identity"
        self.assembler = Assembler(sequence.choices, parser.closes_calls, declared=self.declared)
        gate = self._gate = Gate(
            parser,
            self.assembler,
            holds=self.enforced and plain,
            held_bytes_max=self._limits.hold_bytes,
            retraction=lambda reason: dialect.stream_error(Trouble(reason, RETRACTED)),
            budget=self._holds,
            preview=Preview(),
        )
        if gate.holds:
            await self._pass_held(link, head, gate)
            return
        decoder = None if plain else coding.open_decoder(encoding)
        if plain or decoder is not None:
            await self._pass(link, head, _Watch(gate.receive, decoder, WATCHED_BYTES))
        else:
            gate.blind = True
            await self._pass(link, head)

    async def _pass_held(self, link: Link, head: Head, gate: Gate) -> None:
        """What the gate lets through, and an error in the dialect's shape where the turn does not end well."""
        app = self._app
        framing = self._framing(head)
        if framing is Framing.LENGTH and app.takes_chunks:
            framing = Framing.CHUNKED  # the gate may withhold bytes
        self.start(head, framing)

        witnesses = self._witnesses
        due: list[bytes] = []  # what may go as soon as the turn is committed

        def let_through(data: bytes) -> bool:
            if witnesses is not None:
                witnesses.took(data)
            released = gate.released_calls
            out = self._let_through(gate, data)
            if out:
                (due.append if gate.released_calls > released and self.commit else app.send)(out)
            if gate.holding or self._record.hold_bytes:
                self._record.holding(gate.held_bytes)
                if self._alive is None and framing is not Framing.LENGTH:
                    self._keep_alive_soon()
            self._active_s = self._record.monotonic()
            return gate.over or app.slow or bool(due)

        ending = Ending.CLEAN
        try:
            while await link.pump(let_through) and not gate.over:
                if due:
                    app.send(await self._committed(gate, due.pop()))
                    if gate.over:
                        break
                await app.writable()
                self._active_s = self._record.monotonic()
        except Broken as broken:
            ending = self.ended_by_us or ENDINGS[broken.kind]
        tail = self._let_through(gate, ending)
        self._record.holding(0)
        if not app.gone:
            if tail:
                app.send(tail)
            app.end()
        self.keep_alive = self.keep_alive and framing is not Framing.CLOSE
        if gate.over or ending is not Ending.CLEAN:
            link.abort()
        else:
            self._give_back(link)

    async def _committed(self, gate: Gate, released: bytes) -> bytes:
        """What was held, once the ledger says that this is the turn; or what the app must be told instead."""
        if gate.verdict is not None and self.commit is not None and not await self.commit(gate.verdict):
            gate.released_calls = 0
            return gate.abandon(Reason.DISPATCH_CONFLICT)
        return released

    def _keep_alive_soon(self) -> None:
        self._alive = asyncio.get_running_loop().call_later(self._timeouts.keep_alive_s, self._keep_alive)

    def _keep_alive(self) -> None:
        """Calls have been held for a while: an app that hears nothing for long gives up."""
        self._alive = None
        if self._gate is not None and self._gate.holding and not self._app.gone:
            if not self._app.slow:
                self._app.send_aside(sse.KEEP_ALIVE)
            self._keep_alive_soon()

    def _let_through(self, gate: Gate, what: bytes | Ending) -> bytes:
        """What the gate makes of these bytes, or of the end. A fault of ours ends the turn as a broken one does."""
        try:
            return gate.receive(what) if isinstance(what, bytes) else gate.finish(what)
        except Exception as error:  # noqa: BLE001 - counted; the app must not take what it has for the whole
            self._record.failed("gate", error)
            return gate.abandon()

    async def _pass(
        self, link: Link, head: Head, watch: "_Watch | None" = None, first: Sequence[bytes] = ()
    ) -> None:
        """Every byte as it comes, after the `first` that were read already; `watch` sees them afterwards."""
        app = self._app
        framing = self._framing(head)
        self.start(head, framing)
        witnesses = self._witnesses
        for data in first:
            app.send(data)
            if witnesses is not None:
                witnesses.took(data)

        def pass_on(data: bytes) -> bool:
            nonlocal watch
            app.send(data)
            if witnesses is not None:
                witnesses.took(data)
            if watch is not None and not self._seen(watch.see, data):
                watch = None
            self._active_s = self._record.monotonic()
            return app.slow

        ending = Ending.CLEAN
        try:
            while await link.pump(pass_on):
                await app.writable()
                self._active_s = self._record.monotonic()
        except Broken as broken:
            ending = self.ended_by_us or ENDINGS[broken.kind]
        if watch is not None:
            self._seen(watch.flush)
        self._watched(ending)
        if ending is Ending.CLEAN:
            app.end()
            self.keep_alive = self.keep_alive and framing is not Framing.CLOSE
            self._give_back(link)
        else:
            self.keep_alive = False
            if not app.gone:
                self._record.went_wrong("retracted", "provider_stream_broken")
                app.cut()

    def _seen(self, look: Callable[..., None], *data: bytes) -> bool:
        """Judge bytes that have been passed on; False where that is not possible any more."""
        try:
            look(*data)
            return True
        except coding.CodingError as error:
            self._record.failed("coding", error)
        except Exception as error:  # noqa: BLE001 - what is only watched goes on whatever breaks here
            self._record.failed("gate", error)
        if self._gate is not None:
            self._gate.blind = True
        return False

    def _watched(self, ending: Ending) -> None:
        """The last word on a watched stream."""
        if self._gate is None:
            return
        if self._gate.blind:
            self._record.unjudged(Reason.SURFACE_UNCOVERED)
            return
        try:
            self._gate.finish(ending)
        except Exception as error:  # noqa: BLE001 - what is only watched goes on whatever breaks here
            self._record.failed("gate", error)

    # What the provider says of the request

    async def _pass_error(self, link: Link, head: Head) -> None:
        """Passed as it comes; then read, for it may be about the sequence."""
        kept = Kept(answers.BODY_MAX)
        await self._pass(link, head, _Watch(kept.add, None, 0))
        encoding, body = _encoding(head), b"".join(kept.parts)
        try:
            if encoding != b"identity" and (decoder := coding.open_decoder(encoding)) is not None:
                body = decoder.feed(body)
            self._record.answered(answers.classify(self._record.api, self._record.server, head.status, body))
        except coding.CodingError as error:
            self._record.failed("coding", error)
        except Exception as error:  # noqa: BLE001 - counted; the answer has been passed on
            self._record.failed("classify", error)

    def read_success(self) -> None:
        """An answer with a good status says that the request was taken; an error in its place refuses it all the same."""
        if self._witnesses is None:
            return
        self._record.answered(answers.ACCEPTED)
        assembler = self.assembler
        if assembler is None or not assembler.failure or assembler.text_characters or assembler.calls:
            return
        error = assembler.failure.encode(errors="replace")
        self._record.answered(answers.classify_error_event(self._record.api, self._record.server, error))

    # Whole JSON answers

    async def _watch_whole(self, link: Link, head: Head, sequence: MessageSequence, dialect: Dialect) -> None:
        """Passed as it comes, judged behind its last byte."""
        kept = Kept(self._limits.body_bytes)
        await self._pass(link, head, _Watch(kept.add, None, 0))
        body = kept.whole()
        if body is not None and self._record.outcome == "passed" and not self._app.gone:
            self._verdict = self._judge_whole(head, sequence, dialect, body)

    async def _hold_whole(self, link: Link, head: Head, sequence: MessageSequence, dialect: Dialect) -> None:
        """Judged before its first byte goes on."""
        kept = Kept(self._limits.body_bytes)
        try:
            fits = await self._keep_whole(link, kept)
        except Broken as broken:
            if self._may_ask_again():
                return
            stalled = self.ended_by_us is Ending.STALLED
            reason = Reason.STREAM_STALLED if stalled else Reason.STREAM_TRUNCATED
            self._verdict = TurnVerdict(Turn.UNKNOWN if stalled else Turn.RETRACTED, reason)
            self._withhold(f"the provider's answer broke off ({broken.kind})", reason)
            return
        if not fits:
            self._verdict = TurnVerdict(Turn.RETRACTED, Reason.LIMIT_HOLD)
            self._withhold("all answers together hold more than limits.hold_all_bytes", Reason.LIMIT_HOLD)
            link.abort()
            return
        body = kept.whole()
        if body is None:
            self._record.unjudged(Reason.LIMIT_BODY)
        else:
            verdict = self._verdict = self._judge_whole(head, sequence, dialect, body)
            if verdict is not None and (verdict.turn not in ENDED_WELL or self._holds_cut_call(verdict)):
                self._withhold("the provider's answer cannot be used", verdict.reason or Reason.INTERNAL)
                return
            if (
                verdict is not None
                and verdict.calls
                and self.commit is not None
                and not await self.commit(verdict)
            ):
                self._verdict = TurnVerdict(Turn.RETRACTED, Reason.DISPATCH_CONFLICT)
                self._withhold("another answer is this turn already", Reason.DISPATCH_CONFLICT)
                return
        await self._pass(link, head, first=kept.parts)

    async def _keep_whole(self, link: Link, kept: "Kept") -> bool:
        """Read the answer's body, or as much as may be kept of it; False where the budget for all answers is at its
        end. Raises Broken."""
        held = 0
        try:
            while not kept.full and (data := await link.read()):
                kept.add(data)
                self._active_s = self._record.monotonic()
                if not self._holds.resize(held, held + len(data)):
                    return False
                held += len(data)
            return True
        finally:
            self._holds.resize(held, 0)

    def _holds_cut_call(self, verdict: TurnVerdict) -> bool:
        """True where a turn that ended early holds a call: no call of it may run, and a whole answer is not edited.

        That its arguments parse says nothing: whole Messages answers have objects there, cut or not."""
        assembler = self.assembler
        return verdict.turn is Turn.INCOMPLETE and assembler is not None and bool(assembler.calls)

    def _withhold(self, what: str, reason: Reason) -> None:
        if not self._app.gone:
            self.fail(502, reason, f"{what}; nothing of it was delivered")

    def _judge_whole(
        self, head: Head, sequence: MessageSequence, dialect: Dialect, body: bytes
    ) -> TurnVerdict | None:
        """The verdict on a whole answer, by the code that judges streams; None where it cannot be read."""
        encoding = _encoding(head)
        assembler = Assembler(sequence.choices, declared=self.declared)
        try:
            if encoding != b"identity":
                decoder = coding.open_decoder(encoding)
                if decoder is None:
                    self._record.unjudged(Reason.SURFACE_UNCOVERED)
                    return None
                body = decoder.feed(body)
            for event in dialect.parse_answer(body):
                assembler.receive(event)
        except (Undecodable, coding.CodingError):
            self._record.unjudged(Reason.BODY_UNDECODABLE)
            if self.enforced and b"json" in (head.get(b"content-type") or b""):
                # The provider says it is JSON, and it is not: cut, with a proper end of the transfer.
                return TurnVerdict(Turn.RETRACTED, Reason.STREAM_TRUNCATED)
            return None
        except Exception as error:  # noqa: BLE001 - counted; what cannot be judged passes
            self._record.failed("gate", error)
            return None
        self.assembler = assembler
        return assembler.close(Ending.CLEAN)

    # Answers of our own

    def fail(self, status: int, reason: Reason, message: str, *, retry: bool = False) -> None:
        """Answer with an error in the shape of the app's dialect."""
        dialect = self.dialect or CHAT
        self.answer(
            dialect.error(status, Trouble(reason, message), self._record.operation, retry=retry), reason
        )

    def answer(self, answer: Answer, reason: Reason) -> None:
        """Answer in the provider's stead, with the marks that say so. Only the first word counts."""
        if self.started:
            return
        self.started = True
        self._record.status = answer.status
        self.keep_alive = self.keep_alive and self._app.at_end
        headers = [
            *answer.headers.items(),
            ("x-turngate-operation", self._record.operation),
            ("x-turngate-reason", reason),
        ]
        close = not self.keep_alive or not self._app.keeps_alive
        self._app.start(wire.own_head(answer.status, headers, len(answer.body), close=close), Framing.LENGTH)
        self._app.send(answer.body)

    def _framing(self, head: Head) -> Framing:
        """The answer's framing on the app's side: the upstream's, as far as the app's HTTP version has it."""
        if self._app.head.method == "HEAD" or head.status in (204, 304):
            return Framing.NONE
        if head.chunked:
            return Framing.CHUNKED if self._app.takes_chunks else Framing.CLOSE
        return Framing.CLOSE if head.content_length is None else Framing.LENGTH

    def _give_back(self, link: Link) -> None:
        """To the pool, unless the request was not written in full."""
        if self._app.at_end:
            link.release()
        else:
            link.abort()


class Kept:
    """Bytes kept aside up to a bound. Beyond it `full` is true and nothing more is kept."""

    __slots__ = ("full", "left", "parts")

    def __init__(self, bytes_max: int) -> None:
        self.parts: list[bytes] = []
        self.left = bytes_max
        self.full = False

    def add(self, data: bytes) -> None:
        if not self.full:
            self.parts.append(data)
            self.left -= len(data)
            self.full = self.left < 0

    def whole(self) -> bytes | None:
        """All of it, or None where it was too much."""
        if self.full:
            return None
        return self.parts[0] if len(self.parts) == 1 else b"".join(self.parts)


class _Watch:
    """A reader beside the bytes. Nobody waits for what it finds, so it looks at `batch_bytes` at a time: a delta read
    by itself costs three times what it costs among others."""

    __slots__ = ("_batch_bytes", "_bytes", "_decoder", "_parts", "_receive")

    def __init__(
        self, receive: Callable[[bytes], object], decoder: coding.Decoder | None, batch_bytes: int
    ) -> None:
        self._receive = receive
        self._decoder = decoder
        self._batch_bytes = batch_bytes
        self._parts: list[bytes] = []
        self._bytes = 0

    def see(self, data: bytes) -> None:
        """Take bytes. Raises coding.CodingError."""
        self._parts.append(data)
        self._bytes += len(data)
        if self._bytes >= self._batch_bytes:
            self.flush()

    def flush(self) -> None:
        """Look at what was taken. Raises coding.CodingError."""
        data = b"".join(self._parts)
        self._parts.clear()
        self._bytes = 0
        if data:
            self._receive(self._decoder.feed(data) if self._decoder is not None else data)


async def _pump(tunnel: Tunnel, link: Link) -> None:
    """The app's bytes to the provider until one of them closes."""
    while data := await tunnel.read():
        link.write(data)
        await link.drain()
    link.abort()


def _encoding(head: Head) -> bytes:
    return (head.get(b"content-encoding") or b"identity").strip().lower()


def _error_type(status: int) -> str:
    """Whose fault an error status is."""
    if status >= 500:
        return "provider_error"
    return {
        401: "caller_auth",
        403: "caller_auth",
        404: "caller_not_found",
        413: "caller_too_large",
        429: "provider_rate_limit",
    }.get(status, "caller_invalid_request")
