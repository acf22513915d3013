"""Settings: three sources in order of rank, and texts that say which key, which value, and what is allowed."""

import os
import re
from pathlib import Path

import pytest

from turngate.proxy.config import (
    CONFIG_VARIABLE,
    DEFAULT_UPSTREAMS,
    ENV_PREFIX,
    Address,
    Settings,
    SettingsError,
    load,
    unknown_variables,
)
from turngate.proxy.control import Declared
from turngate.proxy.gates import RollbackLimits, Thresholds
from turngate.proxy.rollout import Stage


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An empty directory, and no variable of ours in the environment."""
    monkeypatch.chdir(tmp_path)
    for name in os.environ:
        if name.startswith(ENV_PREFIX):
            monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def write(text: str, name: str = "turngate.yaml") -> Path:
    path = Path(name)
    path.write_text(text)
    return path


def refused(text: str) -> str:
    """What is said about these settings."""
    write(text)
    with pytest.raises(SettingsError) as caught:
        load()
    return str(caught.value)


def test_without_any_source_the_defaults_hold(tmp_path: Path) -> None:
    settings = load()
    assert (str(settings.listen), str(settings.metrics), str(settings.admin)) == (
        "127.0.0.1:8787",
        "127.0.0.1:8788",
        "127.0.0.1:8789",
    )
    assert settings.stage is Stage.OBSERVE
    assert settings.upstreams == DEFAULT_UPSTREAMS
    assert {name: upstream.url for name, upstream in settings.upstreams.items()} == {
        "openai": "https://api.openai.com",
        "anthropic": "https://api.anthropic.com",
    }
    assert settings.data_dir == tmp_path / "state" / "turngate"
    assert (settings.ledger.lease_s, settings.ledger.settle_s, settings.drain_s) == (10.0, 5.0, 25.0)
    assert not settings.allow_remote


def test_gates_and_limits_have_the_documented_defaults_and_can_be_set() -> None:
    assert load().declared() == Declared()
    write("{promotion: {samples_min: 50}, rollback: {misses: 0, window_s: 60}}")
    declared = load().declared()
    assert declared.thresholds == Thresholds(samples_min=50)
    assert declared.limits == RollbackLimits(misses=0, window_s=60)
    assert "rollback.window_s" in refused("rollback: {window_s: 0}")


def test_without_a_state_home_the_data_lies_under_the_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert load().data_dir == Path("/home/somebody/.local/state/turngate")


def test_a_flag_wins_over_a_variable_and_that_over_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    write("{stage: 'off', drain_s: 1, default_upstream: openai}")
    monkeypatch.setenv("TURNGATE_DRAIN_S", "2")
    monkeypatch.setenv("TURNGATE_DEFAULT_UPSTREAM", "openai")
    settings = load(default_upstream="anthropic")
    assert (settings.stage, settings.drain_s, settings.default_upstream) == (Stage.OFF, 2.0, "anthropic")


def test_an_address_can_be_set_by_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TURNGATE_LISTEN", "127.0.0.1:2")
    assert load().listen.port == 2


def test_a_flag_that_was_not_given_hides_nothing() -> None:
    write("stage: enforce-text")
    assert load(stage=None, listen=None).stage is Stage.ENFORCE_TEXT
    assert load(stage="off").stage is Stage.OFF


def test_off_without_quotes_is_off_although_yaml_reads_false() -> None:
    write("stage: off\nlog: off\nscopes: [{match: {model: x}, stage: off}]")
    settings = load()
    assert (settings.stage, settings.log, settings.scopes[0].stage) == (Stage.OFF, "off", Stage.OFF)


def test_a_collector_with_credentials_in_its_url_is_refused() -> None:
    write("otlp: {endpoint: 'http://user:secret@127.0.0.1:4318'}")
    with pytest.raises(SettingsError) as caught:
        load()
    assert "secret" not in str(caught.value)


def test_one_value_of_a_section_can_be_set_by_variable_and_the_rest_by_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write("limits: {body_bytes: 2048, hold_bytes: 4096}")
    monkeypatch.setenv("TURNGATE_LIMITS__HOLD_BYTES", "8192")
    monkeypatch.setenv("TURNGATE_LEDGER__SETTLE_S", "0")
    settings = load()
    assert (settings.limits.body_bytes, settings.limits.hold_bytes) == (2048, 8192)
    assert (settings.ledger.lease_s, settings.ledger.settle_s) == (10.0, 0.0)


def test_an_upstream_can_be_added_by_each_source(monkeypatch: pytest.MonkeyPatch) -> None:
    write("upstreams: {vllm: {url: 'http://127.0.0.1:8000', server: vllm}}")
    monkeypatch.setenv("TURNGATE_UPSTREAMS__GROQ__URL", "https://api.groq.com/openai")
    settings = load(upstreams={"ollama": {"url": "http://127.0.0.1:11434"}})
    assert sorted(settings.upstreams) == ["anthropic", "groq", "ollama", "openai", "vllm"]
    assert settings.upstreams["vllm"].server == "vllm"


def test_a_named_upstream_takes_the_place_of_a_default_one_and_leaves_the_other() -> None:
    write("upstreams: {openai: {url: 'http://127.0.0.1:9999/'}}")
    settings = load()
    assert settings.upstreams["openai"].url == "http://127.0.0.1:9999"
    assert settings.upstreams["anthropic"] == DEFAULT_UPSTREAMS["anthropic"]


def test_the_file_is_the_flags_then_the_variables_then_the_one_in_the_directory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write("stage: 'off'")
    variable, flag = write("stage: enforce-text", "a.yaml"), write("stage: enforce-tools", "b.yaml")
    assert load().stage is Stage.OFF
    monkeypatch.setenv(CONFIG_VARIABLE, str(variable))
    assert load().stage is Stage.ENFORCE_TEXT
    assert load(flag).stage is Stage.ENFORCE_TOOLS


def test_a_named_file_must_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SettingsError, match=r"cannot read settings from gone\.yaml: there is no such file"):
        load(Path("gone.yaml"))
    monkeypatch.setenv(CONFIG_VARIABLE, "away.yaml")
    with pytest.raises(SettingsError, match=r"away\.yaml"):
        load()


def test_an_empty_file_sets_nothing() -> None:
    write("")
    assert load().stage is Stage.OBSERVE


REFUSED: dict[str, tuple[str, list[str]]] = {
    "unknown key": (
        "listem: x",
        ["listem: no such setting", "did you mean listen?", "allowed here:", "upstreams"],
    ),
    "unknown key in a section": (
        "limits: {body_byte: 1}",
        [
            "limits.body_byte: no such setting",
            "did you mean body_bytes?",
            "allowed here: body_bytes, hold_all_bytes, hold_bytes",
        ],
    ),
    "unknown key of an upstream": (
        "upstreams: {x: {url: 'http://a', sever: y}}",
        ["upstreams.x.sever: no such setting", "did you mean server?"],
    ),
    "unknown key of a scope's match": (
        "scopes: [{stage: observe, match: {modell: x}}]",
        [
            "scopes.0.match.modell: no such setting",
            "did you mean model?",
            "allowed here: header, model, upstream",
        ],
    ),
    "a word that is no stage": (
        "stage: enforce",
        ["stage: 'enforce' is not allowed", "'enforce-text'", "'off'"],
    ),
    "a scope without stage": ("scopes: [{match: {model: x}}]", ["scopes.0.stage", "required"]),
    "a number that is none": ("drain_s: soon", ["drain_s: 'soon' is not allowed", "number"]),
    "a number below its bound": (
        "limits: {body_bytes: 10}",
        ["limits.body_bytes: 10 is not allowed", "greater than or equal to 1024"],
    ),
    "a lease of nothing": ("ledger: {lease_s: 0}", ["ledger.lease_s: 0 is not allowed", "greater than 0"]),
    "an address without port": ("listen: localhost", ["listen: 'localhost' is not allowed", "HOST:PORT"]),
    "a port out of range": ("listen: '127.0.0.1:70000'", ["listen.port: 70000 is not allowed", "65535"]),
    "an upstream without URL": ("upstreams: {x: {server: y}}", ["upstreams.x.url", "required"]),
    "a URL of another kind": (
        "upstreams: {x: {url: 'ftp://a'}}",
        ["upstreams.x.url: 'ftp://a' is not allowed"],
    ),
    "a default upstream that is none": (
        "default_upstream: nobody",
        ["default_upstream: 'nobody' is no upstream; there are anthropic, openai"],
    ),
    "an open data port": ("listen: '0.0.0.0:8787'", ["listen: 0.0.0.0:8787", "open relay", "--allow-remote"]),
    "no YAML": ("listen: [", ["cannot read settings from turngate.yaml"]),
    "a list instead of a table": ("- listen", ["cannot read settings from turngate.yaml"]),
}


@pytest.mark.parametrize(("text", "said"), REFUSED.values(), ids=REFUSED)
def test_bad_settings_are_refused_with_key_value_and_what_is_allowed(text: str, said: list[str]) -> None:
    told = refused(text)
    assert [words for words in said if words not in told] == [], told


def test_every_fault_is_told_in_its_own_line() -> None:
    assert len(refused("{stage: x, drain_s: y, nonsense: z}").splitlines()) == 3


def test_a_bad_variable_is_refused_like_a_bad_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TURNGATE_STAGE", "nonsense")
    with pytest.raises(SettingsError, match="stage: 'nonsense' is not allowed"):
        load()


def test_a_credential_in_a_refused_value_is_not_repeated() -> None:
    told = refused("upstreams: {x: {url: 'http://user:hunter2@host'}}")
    assert "hunter2" not in told
    assert "upstreams.x.url" in told


LOOPBACK = {
    "127.0.0.1:8787": True,
    "127.8.9.1:1": True,
    "localhost:1": True,
    "[::1]:8787": True,
    ":8787": True,
    "0.0.0.0:8787": False,
    "[::]:8787": False,
    "10.0.0.1:8787": False,
    "example.org:80": False,
}


@pytest.mark.parametrize(("address", "local"), LOOPBACK.items())
def test_off_loopback_the_data_port_wants_a_word(address: str, local: bool) -> None:
    assert load(listen=address, allow_remote=True).listen.is_loopback is local
    if local:
        assert load(listen=address).listen.is_loopback
    else:
        with pytest.raises(SettingsError, match="allow_remote"):
            load(listen=address)


def test_an_address_reads_back_as_it_is_written() -> None:
    for text in ("127.0.0.1:8787", "[::1]:8787", "localhost:0"):
        address = load(listen=text).listen
        assert str(address) == text
    assert load(listen="[::1]:1").listen == Address(host="::1", port=1)


def test_the_stages_of_the_scopes_are_read_in_their_order() -> None:
    write(
        """
        stage: enforce-text
        scopes:
        - {match: {upstream: openai, model: "gpt-4*"}, stage: enforce-tools}
        - {match: {upstream: openai}, stage: "off"}
        """
    )
    ladder = load().ladder()
    assert ladder.stage("openai", "gpt-4o") is Stage.ENFORCE_TOOLS
    assert ladder.stage("openai", "o3") is Stage.OFF
    assert ladder.stage("anthropic", "claude-sonnet-4-5") is Stage.ENFORCE_TEXT


def test_settings_cannot_be_changed_once_read() -> None:
    settings = load()
    with pytest.raises(ValueError, match="frozen"):
        settings.stage = Stage.OFF


def test_variables_that_are_no_settings_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TURNGATE_PORT", "TURNGATE_LIMITS__BODY_BYTES", "TURNGATE_STAGE", CONFIG_VARIABLE):
        monkeypatch.setenv(name, "1")
    assert unknown_variables() == ["TURNGATE_PORT"]


def test_a_variable_that_is_no_setting_does_not_stop_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TURNGATE_PORT", "tcp://10.0.0.1:80")
    assert load().stage is Stage.OBSERVE


@pytest.mark.parametrize("name", Settings.model_fields)
def test_every_setting_is_named_where_an_unknown_key_is_refused(name: str) -> None:
    assert re.search(rf"\b{name}\b", refused("unheard_of: 1"))
