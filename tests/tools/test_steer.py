"""``steer``: activations are changed by place, step and position of the token."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import torch
from safetensors.numpy import save_file
from torch.utils.checkpoint import checkpoint

import amanda
from amanda.errors import FileError, UnsupportedProgramError
from amanda_tools.dump import DumpTool
from amanda_tools.steer import SteerTool
from tests import torchvision_ops  # noqa: F401 - transformers imports torchvision if it is there
from tests.running import run_python

X = np.arange(24, dtype="float32").reshape(2, 3, 4) / 10
V = np.float32([1, -2, 3, 0.5])


def doubled(mode: str, x: Any = X) -> Any:
    """Twice x, from a layer without bias."""
    if mode == "torch":
        layer = torch.nn.Linear(4, 4, bias=False)
        with torch.no_grad():
            layer.weight.copy_(2 * torch.eye(4))
            return torch.nn.Sequential(layer)(torch.tensor(x)).numpy()
    dense = keras.layers.Dense(4, use_bias=False, name="0")
    model = keras.Sequential([keras.Input((3, 4)), dense], name="net")
    dense.set_weights([2 * np.eye(4)])
    return model.predict(x, verbose=0) if mode == "graph" else model(tf.constant(x)).numpy()


@pytest.mark.parametrize("how", ["add", "scale", "replace"])
@pytest.mark.parametrize("mode", ["torch", "eager", "graph"])
def test_outputs_of_a_module_are_changed(mode: str, how: Any, tmp_path: Path) -> None:
    """By a number, a vector or a row for each token, at some tokens, in every mode."""
    np.save(tmp_path / "v.npy", V)
    # In a graph the model's inputs, and so the tokens in an axis of all samples, are not known.
    place = {"torch": "0", "eager": "net/0", "graph": "net/0/Reshape:1"}[mode]
    save_file({place: np.stack([V, -V])}, tmp_path / "rows.safetensors")
    change = {"add": np.add, "scale": np.multiply, "replace": lambda y, v: v + 0 * y}[how]
    cases: list[tuple[dict[str, Any], Any, Any]] = [
        ({"at": place, "value": 3}, slice(None), 3),
        ({"at": ["zero", place], "file": f"{tmp_path}/v.npy", "tokens": ["0", "2-"]}, [0, 2], V),
        ({"file": f"{tmp_path}/rows.safetensors", "value": 2}, [0, 1], 2 * np.stack([V, -V])),
        ({"at": "*0*", "steps": "1-"}, [], 1),
    ]
    for options, tokens, value in cases:
        expected = 2 * X
        expected[:, tokens] = change(expected[:, tokens], value)
        tool = SteerTool(how=how, **options)
        with amanda.apply(tool):
            np.testing.assert_array_equal(doubled(mode), expected)
        assert tool.result()["summary"]["changed"] == (tokens != [])


@pytest.mark.parametrize("mode", ["torch", "eager", "graph"])
def test_outputs_of_a_recording_are_put_in(mode: str, tmp_path: Path) -> None:
    """All outputs of an earlier run, or those of a module, replace the new ones, in every mode."""
    with amanda.apply(dump := DumpTool()):
        clean = doubled(mode)
    [*_, index] = dump.write_files(tmp_path, "dump")
    for file, at in (tmp_path, []), (index, "0" if mode == "torch" else "net/0"):
        tool = SteerTool(how="replace", file=f"{file}", at=at)
        for x in -X, X + 1:
            with amanda.apply(tool):
                np.testing.assert_array_equal(doubled(mode, x), clean, strict=True)
    with pytest.raises(FileError, match="has no outputs of none"):
        SteerTool(file=f"{tmp_path}", at=["*", "none"])
    with amanda.apply(tool), pytest.raises(UnsupportedProgramError, match=r"shape .[26], "):
        doubled("torch" if mode == "torch" else "eager", X[:1])


def language_model(kind: str) -> Any:
    import transformers as hf

    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    special = {"bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
    if kind == "gpt2":
        return hf.GPT2LMHeadModel(hf.GPT2Config(**sizes, **special)).eval()
    return hf.LlamaForCausalLM(hf.LlamaConfig(intermediate_size=32, **sizes, **special)).eval()


@pytest.mark.parametrize(
    ("kind", "place"),
    [
        ("gpt2", "transformer.h.0.mlp.c_proj"),  # whose tokens are all in one axis
        ("gpt2", "*.h.0/add:1"),  # the residual stream
        ("llama", "model.layers.0.mlp.down_proj"),
    ],
)
def test_positions_are_those_of_the_sequence(kind: str, place: str, tmp_path: Path) -> None:
    """Of a prompt with padding, with each kind of cache, as without one; and a one-token prompt."""
    model = language_model(kind)
    np.save(tmp_path / "v.npy", np.random.default_rng(0).normal(size=16))
    tool = SteerTool(at=place, file=f"{tmp_path}/v.npy", value=4, tokens=["0", "3-4"])
    for tokens in map(torch.tensor, ([[5, 6, 7], [8, 9, 10]], [[0, 0, 4], [8, 9, 10]], [[5]])):

        def logits(**how: Any) -> torch.Tensor:
            given = {"max_new_tokens": 5, "do_sample": False, "disable_compile": True, **how}
            given |= {"output_logits": True, "return_dict_in_generate": True}
            mask = (tokens != 0).long()  # noqa: B023 - called in this iteration
            return torch.stack(model.generate(tokens, attention_mask=mask, **given).logits)  # noqa: B023

        plain = logits()
        with amanda.apply(tool):
            steered = logits()
            torch.testing.assert_close(logits(cache_implementation="static"), steered)
            torch.testing.assert_close(logits(use_cache=False), steered)
        assert not any(torch.allclose(*pair) for pair in zip(plain, steered, strict=True))


def test_activations_are_patched(tmp_path: Path) -> None:
    """Each output of an operator has the values of its own execution, to the last bit."""
    model, dump = language_model("gpt2"), DumpTool()

    def outputs(*prompts: list[int]) -> list[torch.Tensor]:
        return [torch.cat(model(torch.tensor([ids])).logits.split(32, 2)) for ids in prompts]

    with torch.no_grad(), amanda.apply(dump):
        expected = outputs([5, 6, 7], [8, 9, 9])
    dump.write_files(tmp_path, "dump")
    for at in [], ["*.h.1/add:1"], ["/split:0"]:
        with torch.no_grad(), amanda.apply(SteerTool(file=f"{tmp_path}", how="replace", at=at)):
            assert all(map(torch.equal, expected, outputs([3, 2, 1], [4, 4, 0])))
            with pytest.raises(UnsupportedProgramError, match=r"no output 0 of .*, execution 2"):
                outputs([3, 2, 1])


@pytest.mark.parametrize("reentrant", [True, False])
def test_recordings_with_and_without_checkpoints_fit_both(reentrant: bool, tmp_path: Path) -> None:
    """What a checkpoint runs again is no execution of its own."""
    layers = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 4))

    def gradients(tool: amanda.Tool, sign: int, is_kept: bool) -> list[list[list[float]]]:
        again = partial(checkpoint, layers, use_reentrant=reentrant)
        layers.zero_grad()
        with amanda.apply(tool):
            for step in range(3):
                x = torch.tensor(sign * X[0] * (step + 1), requires_grad=True)
                (layers if is_kept else again)(x).square().sum().backward()
        return [p.grad.tolist() for p in layers.parameters()]

    recordings = [DumpTool(tensors=["activations"]) for _ in range(2)]
    expected = [gradients(tool, 1, i > 0) for i, tool in enumerate(recordings)]
    assert expected[0] == expected[1]
    rows = [[e.key for e in tool.entries if "detach" not in e.key] for tool in recordings]
    assert rows[0] == rows[1]
    for tool in recordings:
        tool.write_files(tmp_path, "dump")
        steers = [SteerTool(file=f"{tmp_path}", how="replace", at=["1"]) for _ in range(2)]
        changed = [gradients(steer, 2, i > 0) for i, steer in enumerate(steers)]
        assert changed[0] == changed[1] != expected[0]
        assert [row["executions"] for steer in steers for row in steer.op_rows()] == [3, 3]


def test_a_loop_with_a_cache_goes_on() -> None:
    """Without ``position_ids`` a pass of one token follows the one before it."""
    model, seen = language_model("llama"), []
    tool = SteerTool(at="model.layers.1.mlp.down_proj", tokens=["3"])
    with torch.no_grad(), amanda.apply(tool):
        for _ in range(2):
            cache = None
            for ids in [[5, 6, 7]], [[8]], [[9]]:
                mask = torch.ones(1, 3 if cache is None else cache.get_seq_length() + 1)
                cache = model(torch.tensor(ids), mask, past_key_values=cache).past_key_values
                seen.append(tool.result()["summary"]["changed"])
    assert seen == [0, 1, 1, 1, 2, 2]


def test_an_operator_at_several_places_is_executed_once() -> None:
    """Each place changes what the one before has left; figures count executions."""
    tool = SteerTool(at=["0", "*0*"], value=3)
    with amanda.apply(tool):
        np.testing.assert_array_equal(doubled("torch"), 2 * X + 3 + 3)
    [row] = tool.op_rows()
    assert (row["executions"], row["changed"]) == (1, 1)


def test_labels_are_no_positions() -> None:
    """Also where they rise by one at their end."""
    model, ids = language_model("llama"), torch.tensor([[3, 9, 30, 31]])
    tool = SteerTool(at="model.layers.1.mlp.down_proj", tokens=["0-1"])
    with torch.no_grad(), amanda.apply(tool):
        model(ids, labels=ids)
    assert tool.result()["summary"]["changed"] == 1


def test_gradients_are_those_of_what_is_computed() -> None:
    """A layer that is scaled has a gradient that is."""
    layer = torch.nn.Linear(4, 4)
    with amanda.apply(SteerTool(at="", how="scale", value=0.5)):
        layer(torch.tensor(X)).sum().backward()
    assert layer.bias.grad.tolist() == [3.0] * 4


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({}, ValueError, "give at=, op ids and module paths"),
        ({"at": "a", "file": "v.safetensors"}, ValueError, "give at="),
        ({"at": "a", "file": "none.npy"}, OSError, "^none.npy cannot be read: No such file"),
        ({"file": "none.safetensors"}, OSError, "none.safetensors"),
        ({"at": "a", "tokens": "3:5"}, ValueError, "'3:5' is no number, and no range such as 3-5"),
        ({"at": "a", "tokens": "5-3"}, ValueError, "'5-3' is no number"),
        ({"at": "a", "file": ""}, ValueError, "give at="),
        ({"at": "a", "file": "words.npy"}, FileError, "words.npy cannot be read"),
        ({"file": "empty.safetensors"}, FileError, "has no tensors"),
    ],
)
def test_wrong_options_are_refused(
    options: dict[str, Any], error: type, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the program runs, with the right form."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "words.npy").write_text("no numbers")
    save_file({}, tmp_path / "empty.safetensors")
    with pytest.raises(error, match=said):
        SteerTool(**options)


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    """A tensor of another size, and tokens where an output has none; the message names both."""
    np.save(tmp_path / "v.npy", np.ones(5))
    model, x = torch.nn.Sequential(torch.nn.Linear(4, 4)), torch.ones(2, 9, 3, 4)
    for options, said in (
        ({"file": f"{tmp_path}/v.npy"}, r"has the shape \(5,\), op .*linear:0 gives .2, 9, 3, 4"),
        ({"tokens": "1"}, "gives .2, 9, 3, 4., without a row for each token"),
    ):
        tool = SteerTool(at="0", **options)
        with amanda.apply(tool), pytest.raises(UnsupportedProgramError, match=said):
            model(x)


def test_on_the_command_line(tmp_path: Path) -> None:
    """From a file, with a hint for a module that has no weight of its own."""
    save_file({"0": V, "1": V}, tmp_path / "v.safetensors")
    program = "from torch import nn, ones; nn.Sequential(nn.Linear(4, 4), nn.ReLU())(ones(1, 4))"
    options = "-t", "steer:file=v.safetensors,how=replace", "-c", program
    run = run_python("-m", "amanda", "run", *options, cwd=tmp_path, check=True)
    assert "steer: 1 output changed (replace)" in run.stdout
    assert "it runs Sequential.1/relu:0, to be named by its id" in run.stdout
