"""What cannot work is said before a server is launched, and what may work is left to the server."""

import json

import pytest

from klbench.errors import UsageError
from klbench.session.beforehand import check_beforehand, known_context_length, known_lengths
from klbench.session.request import Options, StartRequest, Target
from klbench.zoo import CONTEXT_LENGTH, plain_token_ids, seeded_prompts

DEMO = Target(kind="demo", model="dense")


def model(folder, **config):
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": 4096, **config}))
    return Target(kind="launch", model_path=str(folder))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (Options(max_new_tokens=99_999_999), "2 x 99999999 generated"),
        (Options(max_new_tokens=8191, helpers=("match",), prompt_tokens=1, samples=1), "prompt 0"),
        (Options(prompt_tokens=3_000_000, samples=1), "prompt 0 does not fit"),
    ],
)
def test_what_cannot_fit_into_the_demos_context_is_refused(options, says):
    with pytest.raises(UsageError, match=says) as error:
        check_beforehand(StartRequest(target=DEMO, options=options))
    assert f"the context of {CONTEXT_LENGTH}" in error.value.what
    assert "--max-new-tokens" in error.value.next


def test_what_fits_exactly_passes():
    options = Options(max_new_tokens=CONTEXT_LENGTH - 2, helpers=("match",), prompt_tokens=1, samples=1)
    check_beforehand(StartRequest(target=DEMO, options=options))
    check_beforehand(StartRequest(target=DEMO))


def test_the_lengths_are_those_of_the_prompts_that_a_seed_makes():
    options = Options(samples=20, prompt_tokens=37, seed=5)
    prompts = seeded_prompts(20, 37, 5, plain_token_ids())
    assert list(known_lengths(options)) == [len(prompt) for prompt in prompts]


def test_of_a_file_only_ids_have_a_length_that_is_known(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"input_ids": [5, 6, 7]}\n{"text": "some words"}\n')
    assert list(known_lengths(Options(prompts=str(file)))) == [3, 1]
    file.write_text(json.dumps({"input_ids": [5] * CONTEXT_LENGTH}))
    with pytest.raises(UsageError, match="prompt 0 does not fit"):
        check_beforehand(StartRequest(target=DEMO, options=Options(prompts=str(file), max_new_tokens=1)))


@pytest.mark.parametrize(
    ("arguments", "length"),
    [
        ((), CONTEXT_LENGTH),
        (("--context-length", "64"), 64),
        (("--context-length=64", "--context-length", "128"), 128),
        (("--context-length", "many"), None),
        (("--config", "server.yaml"), None),
    ],
)
def test_the_users_own_arguments_win(arguments, length):
    assert known_context_length(Target(kind="demo", model="dense", arguments=arguments)) == length


@pytest.mark.parametrize(
    ("config", "length"),
    [
        ({}, 4096),
        ({"rope_scaling": None}, 4096),
        ({"rope_scaling": {"factor": 4.0}}, None),
        ({"seq_length": 128}, None),
        ({"text_config": {"max_position_embeddings": 8192}}, None),
        ({"max_position_embeddings": "long"}, None),
    ],
)
def test_a_models_context_is_known_where_its_configuration_leaves_no_doubt(tmp_path, config, length):
    assert known_context_length(model(tmp_path, **config)) == length


def test_a_server_that_runs_already_is_asked_itself():
    assert known_context_length(Target(kind="url", url="http://127.0.0.1:1")) is None
    assert known_context_length(Target(kind="launch", model_path="org/model")) is None
