"""The checker finds each fault that it is there to find, in histories with one thing forged."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import hiredis
import numpy as np
import pytest
import safetensors.numpy
import torch
from checker.history import Append, History, Name, Recorder, Weights
from checker.raw import Raw
from checker.tagged import LOG_VARIABLE, RECORD, TAG, Tagged, network, steps_of
from checker.verdict import Rules, sessions, verdict

RUN, NUM, STEPS, LANES = "a-run", 40, 5, (7 << 24, 8 << 24)
ON, OFF = Rules(epochs=2), Rules(samples_per_insert=50)


class Case:
    """A run of 40 fragments in which all is as it should be; the last one waits.

    Attributes:
        history, raw: as recorded and as stored.
        sessions: of each, its passes: (hash of the weights, numbers of the fragments).
        learned_steps: of each fragment.
    """

    def __init__(self) -> None:
        self.history, self.raw = History(), Raw(status="active", cursor=b"15-0")
        for seq in range(NUM):
            lanes = tuple(lane + seq * STEPS for lane in LANES)
            one = Append(RUN, Name(1, 9, seq), seq // 4, lanes, STEPS, max(seq - 1, 0) // 4, 99)
            one.answer, one.version, one.ended = "GO", seq // 4, seq + 1
            self.history.appends.append(one)
            self.raw.entries[self.entry(seq)] = one.name
            self.raw.counts[self.entry(seq)] = seq + 1
        self.raw.stored = set(list(self.raw.entries)[10:])
        self.raw.spans = {self.entry(0): self.entry(30), self.entry(10): self.entry(39)}
        self.history.weights = [Weights(RUN, 3, "ab", True, True, "ok"), Weights(RUN, 3, "ab", False, True)]
        self.raw.weights = {3: "ab"}
        self.learned_steps = STEPS
        self.sessions = [[(number, [number // 2]) for number in range(2 * NUM - 2)]]

    @staticmethod
    def entry(seq: int) -> bytes:
        return b"%d-0" % (seq + 1)

    def judge(self, rules: Rules, folder: Path) -> str:
        """Write the log, and return the findings."""
        for number, passes in enumerate(self.sessions):
            with (folder / f"{number}.steps").open("wb") as file:
                for digest, seqs in passes:
                    places = np.arange(self.learned_steps)
                    steps = [one + seq * STEPS + places for seq in seqs for one in LANES]
                    rows = np.concatenate(steps).astype(np.uint64)
                    file.write(RECORD.pack(number, bytes([number] * 8), digest.to_bytes(8), len(rows)))
                    file.write(rows.tobytes())
        return "\n".join(verdict(self.history, self.raw, RUN, rules, folder))


def resent(case: Case, answer: str, **changes: Any) -> None:
    """Send fragment 5 twice; its first answer was another one."""
    first = case.history.appends[5]
    case.history.appends.insert(5, Append(**{**vars(first), "answer": answer, "ended": 0, **changes}))


def killed(case: Case, digest: int) -> None:
    """Kill the learner after 60 passes; the next one starts with the weights `digest` and learns fragments 20 to 38."""
    again = [(digest if not n else 1000 + n, [20 + n // 2]) for n in range(38)]
    case.sessions = [case.sessions[0][:60], again]


def test_passes_are_told_apart_where_weights_no_longer_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(LOG_VARIABLE, str(tmp_path))
    first, second = network((7,)), network((7,))
    x = torch.zeros(2, 7)
    x[:, TAG] = 1.0
    for _ in range(3):
        first(x)
    second.load_state_dict(first.state_dict())
    for net in (second, first):
        net(x)
    one, other = (session.hashes for session in sessions(tmp_path))
    assert len(set(one)) == 4 and other == one[3:]


@pytest.mark.parametrize("num_bytes", [3, RECORD.size, RECORD.size + 79])
def test_a_record_that_a_kill_cut_off_is_left_out(num_bytes: int, tmp_path: Path) -> None:
    case = Case()
    case.judge(ON, tmp_path)
    case.sessions = []
    with (tmp_path / "0.steps").open("ab") as file:
        file.write((RECORD.pack(0, bytes(8), (76).to_bytes(8), 10) + bytes(80))[:num_bytes])
    assert case.judge(ON, tmp_path) == ""


@pytest.mark.parametrize("rules", [ON, OFF])
def test_nothing_is_found_where_nothing_is_wrong(rules: Rules, tmp_path: Path) -> None:
    case = Case()
    resent(case, "no reply")
    assert case.judge(rules, tmp_path) == ""


def test_what_a_killed_learner_did_after_its_checkpoint_does_not_count(tmp_path: Path) -> None:
    case = Case()
    killed(case, digest=40)  # before pass 40, the first one with fragment 20
    assert case.judge(ON, tmp_path) == ""


def delete(case: Case, seq: int) -> None:
    case.raw.stored.discard(case.entry(seq))
    del case.raw.entries[case.entry(seq)]


def change(case: Case, seq: int, **changes: Any) -> None:
    vars(case.history.appends[seq]).update(changes)


def test_a_fragment_that_was_learned_from_between_two_looks_is_not_missed(tmp_path: Path) -> None:
    case = Case()
    delete(case, 17)
    assert case.judge(ON, tmp_path) == ""
    del case.sessions[0][34]  # the first of its two passes
    assert "not learned from 2 times" in case.judge(ON, tmp_path)


def test_a_fragment_that_was_trimmed_early_need_not_be_drawn(tmp_path: Path) -> None:
    """A server without memory makes the learner trim, and the next learner has what is left."""
    case = Case()
    del case.sessions[0][8:10]  # fragment 4
    case.raw.spans = {case.entry(0): case.entry(4), case.entry(10): case.entry(39)}
    assert case.judge(OFF, tmp_path) == ""
    case.raw.spans[case.entry(0)] = case.entry(6)
    assert "never learned from: Name" in case.judge(OFF, tmp_path)


FORGED: list[tuple[str, Rules, Callable[[Case], object]]] = [
    ("neither seen in the stream nor learned", ON, lambda case: delete(case, 39)),
    ("in the stream more than once", ON, lambda case: case.raw.entries.update({b"90-0": Name(1, 9, 3)})),
    ("counted as if", OFF, lambda case: case.raw.counts.update({case.entry(12): 12})),
    ("told that it is not", OFF, lambda case: change(case, 39, answer="STOPPED")),
    ("no checkpoint covers it", OFF, lambda case: case.raw.stored.discard(case.entry(20))),
    ("did nothing wrong", OFF, lambda case: case.raw.dead.update({case.entry(39): "odd"})),
    ("refused without a reason", OFF, lambda case: case.raw.dead.update({case.entry(39): ""})),
    ("refused and learned from", OFF, lambda case: case.raw.dead.update({case.entry(3): "odd"})),
    ("two fragments of this name", OFF, lambda case: resent(case, "FULL", lanes=(9 << 24, 8 << 24))),
    ("which was answered by no reply", OFF, lambda case: change(case, 4, answer="no reply")),
    ("sent after", OFF, lambda case: case.history.appends.pop(8)),
    ("its steps do not follow", OFF, lambda case: change(case, 4, lanes=(1 + (7 << 24), 8 << 24))),
    ("its steps do not follow", OFF, lambda case: change(case, 4, lanes=(-1, 8 << 24))),
    ("played by 1, when 2 was known", OFF, lambda case: change(case, 9, policy_version=1)),
    ("versions went back: 9 to 8", OFF, lambda case: change(case, 39, version=8, known_version=9)),
    ("was not published", OFF, lambda case: change(case, 39, published_version=1)),
    ("several weights of one version: 3", OFF, lambda case: case.raw.weights.update({3: "cd"})),
    ("not finite, versions: 3", OFF, lambda case: case.raw.infinite.append(3)),
    ("checkpoint is damaged", OFF, lambda case: setattr(case.raw, "damaged", "cut")),
    ("solved at", OFF, lambda case: vars(case.raw).update(status="solved", target=1.0)),
    ("never learned from, while later", ON, lambda case: case.sessions[0].__delitem__(slice(20, 22))),
    ("trimmed before it was learned", ON, lambda case: case.sessions[0].__delitem__(slice(6, 8))),
    ("not learned from 2 times", ON, lambda case: case.sessions[0].append((999, [30]))),
    ("not learned from 2 times", ON, lambda case: killed(case, digest=2000)),
    ("not learned from 2 times", ON, lambda case: killed(case, digest=42)),
    ("never learned from: Name", OFF, lambda case: case.sessions[0].__delitem__(slice(20, 22))),
    ("of the newest", Rules(samples_per_insert=55), lambda case: case.sessions[0].__delitem__(slice(72, 78))),
    ("draws of", Rules(samples_per_insert=1), lambda case: case.sessions[0].__iadd__([(0, [1])] * 60)),
    ("steps that nobody sent", OFF, lambda case: case.sessions[0].append((999, [NUM]))),
]


@pytest.mark.parametrize(("words", "rules", "forge"), FORGED, ids=[words for words, *_ in FORGED])
def test_each_rule_can_fail(
    words: str, rules: Rules, forge: Callable[[Case], object], tmp_path: Path
) -> None:
    case = Case()
    forge(case)
    assert words in case.judge(rules, tmp_path)


def test_a_place_that_is_never_drawn_is_found(tmp_path: Path) -> None:
    case = Case()
    case.learned_steps = STEPS - 1
    assert "these lanes and steps of any fragment" in case.judge(OFF, tmp_path)


def test_tags_of_steps_are_unique_and_follow_one_another() -> None:
    env, other = Tagged(), Tagged()
    rows = [env.reset(seed=1)[0]]
    for _ in range(25):
        observation, _, _, truncated, _ = env.step(0)
        rows.append(env.reset()[0] if truncated else observation)
    steps = steps_of(np.array(rows)[:, TAG])
    assert (np.diff(steps.astype(np.int64)) == 1).all()
    assert steps_of(other.reset(seed=1)[0][TAG]) >> 24 != steps[0] >> 24


def test_the_recorder_follows_the_protocol_in_pieces_and_loses_one_reply() -> None:
    recorder = Recorder()
    tap = recorder.tap()
    key, blob = b"ddrl:{r}:weights:4", safetensors.numpy.save({"x": np.array([1.0, np.nan])})
    for byte in hiredis.pack_command((b"EVALSHA", b"0", 2, b"ddrl:{r}:state", key, 4, blob)):
        assert tap.sent(bytes([byte]))
    tap.sent(hiredis.pack_command((b"GET", key)))
    assert tap.received(b"+OK\r\n$3\r\nab") and tap.received(b"c\r\n")
    published, read = recorder.history.weights
    assert (published.version, published.answer, published.is_finite) == (4, "ok", False)
    assert read.digest != published.digest and not read.is_publication
    header = b'{"run":"r","producer":1,"incarnation":2,"seq":3,"policy_version":4,"T":5,"N":1,"C":0,"columns":[%s]}'
    fields = (b"h", header % b'{"name":"observation","shape":[6,1,2]}', b"observation", b"")
    append = hiredis.pack_command((b"EVAL", b"text", 1, b"ddrl:{r}:experience", b"1", *fields))
    recorder.loses_reply = True
    for answer in (b"GO", b"WAIT"):
        tap.sent(append)
        assert tap.received(b"*2\r\n$%d\r\n%s\r\n:4\r\n" % (len(answer), answer)) == (answer == b"WAIT")
    assert [one.answer for one in recorder.history.appends] == ["no reply", "WAIT"]
    assert recorder.history.appends[0].published_version == recorder.history.appends[1].version == 4
    tap.received(b"+OK\r\n")
    assert "without a request" in recorder.history.errors[0]
