"""What the unmodified official client does against a door: `python client_check.py BASE`, with
TINKER_BASE_URL and TINKER_API_KEY. Each check is a function; the name of each that holds is printed. Runs
where the client is installed, without lorad.
"""

import json
import math
import os
import sys
import time
import urllib.request
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import tinker
from tinker import types

warnings.simplefilter("ignore")
BASE = sys.argv[1]
TEXT = [5, 9, 12, 7, 5, 9, 12, 7, 30, 31]
CLOSE = 2e-4  # nats between the engine and the trainer


def datum(tokens: list[int], **inputs: Any) -> Any:
    """A datum whose targets are the next tokens."""
    given = {"target_tokens": tokens[1:], **(inputs or {"weights": [1.0] * (len(tokens) - 1)})}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=given)


DATA = [datum(TEXT), datum(TEXT[:4]), datum(TEXT[::-1])]
PROMPT = types.ModelInput.from_ints(TEXT[:4])


class Checks:
    """One session, a model in it, and what the checks before left."""

    def __init__(self) -> None:
        self.service = tinker.ServiceClient(user_metadata={"who": "check"}, display_name="check")
        self.rest = tinker.RestClient()
        self.training = self.model()

    def model(self, rank: int = 8, seed: int = 1) -> Any:
        made = self.service.create_lora_training_client(base_model=BASE, rank=rank, seed=seed)
        return made.result()

    def loss(self, client: Any, data: Any = DATA) -> float:
        return float(client.forward(data, "cross_entropy").result().metrics["loss:sum"])

    def step(self, client: Any, lr: float = 1e-2) -> Any:
        """Both are sent before either is waited for."""
        one = client.forward_backward(DATA, "cross_entropy")
        two = client.optim_step(types.AdamParams(learning_rate=lr))
        return one.result(), two.result()

    def capabilities(self) -> None:
        names = [m.model_name for m in self.rest.get_server_capabilities().result().supported_models]
        assert BASE in names, names
        info = self.training.get_info()
        assert info.model_data.model_name == BASE and info.lora_rank == 8

    def tokenizer_of_the_base(self) -> None:
        tokenizer = self.training.get_tokenizer()
        assert tokenizer.decode(tokenizer.encode("3 1 2")) == "3 1 2"

    def cross_entropy_falls(self) -> None:
        before = self.training.forward(DATA, "cross_entropy").result()
        assert [len(o["logprobs"].data) for o in before.loss_fn_outputs] == [len(TEXT) - 1, 3, len(TEXT) - 1]
        losses = []
        for _ in range(4):
            passed, stepped = self.step(self.training)
            losses.append(passed.metrics["loss:sum"])
            assert stepped.metrics["grad_norm"] > 0
        assert math.isclose(losses[0], before.metrics["loss:sum"], rel_tol=1e-5)
        assert losses[-1] < losses[0], losses

    def samples_are_of_the_model(self) -> None:
        self.sampler = self.training.save_weights_and_get_sampling_client().result()
        params = types.SamplingParams(max_tokens=8, temperature=1.0, seed=5)
        made = self.sampler.sample(PROMPT, num_samples=3, sampling_params=params).result()
        again = self.sampler.sample(PROMPT, num_samples=3, sampling_params=params).result()
        assert [s.tokens for s in made.sequences] == [s.tokens for s in again.sequences]
        self.sampled = made.sequences[0]
        self.whole = TEXT[:4] + list(self.sampled.tokens)
        scored = self.sampler.compute_logprobs(types.ModelInput.from_ints(self.whole)).result()
        assert scored[0] is None and np.allclose(scored[4:], self.sampled.logprobs, atol=CLOSE)
        own = self.training.forward([datum(self.whole)], "cross_entropy").result().loss_fn_outputs[0]
        assert np.allclose(own["logprobs"].data, scored[1:], atol=CLOSE)

    def prompt_logprobs_of_the_end(self) -> None:
        text = types.ModelInput.from_ints(self.whole)
        scored = self.sampler.compute_logprobs(text, prompt_logprobs_last_n=2).result()
        assert scored[:-2] == [None] * (len(self.whole) - 2) and None not in scored[-2:]

    def length_and_stop(self) -> None:
        params = types.SamplingParams(max_tokens=3, temperature=0.0, stop=[])
        cold = self.sampler.sample(PROMPT, 1, params).result().sequences[0]
        assert cold.stop_reason == "length" and len(cold.tokens) == 3
        params = types.SamplingParams(max_tokens=8, temperature=0.0, stop=[cold.tokens[0]])
        stopped = self.sampler.sample(PROMPT, 1, params).result().sequences[0]
        assert stopped.stop_reason == "stop" and list(stopped.tokens) == [cold.tokens[0]]

    def top_k_and_top_p(self) -> None:
        """One token is left of each place, whatever the temperature."""
        greedy = types.SamplingParams(max_tokens=6, temperature=0.0, stop=[])
        best = list(self.sampler.sample(PROMPT, 1, greedy).result().sequences[0].tokens)
        for narrow in ({"top_k": 1}, {"top_p": 1e-6}):
            params = types.SamplingParams(max_tokens=6, temperature=1.0, stop=[], seed=3, **narrow)
            made = self.sampler.sample(PROMPT, 2, params).result()
            assert all(list(one.tokens) == best for one in made.sequences), (narrow, made.sequences, best)

    def most_likely_tokens_of_the_prompt(self) -> None:
        text, few = types.ModelInput.from_ints(self.whole), types.SamplingParams(max_tokens=1)
        found = self.sampler.sample(
            text, 1, few, include_prompt_logprobs=True, topk_prompt_logprobs=3
        ).result()
        assert found.prompt_logprobs[0] is None and len(found.topk_prompt_logprobs) == len(self.whole)
        for token, own, top in zip(
            self.whole[1:], found.prompt_logprobs[1:], found.topk_prompt_logprobs[1:], strict=True
        ):
            values = [logprob for _, logprob in top]
            assert len(top) == 3 and values == sorted(values, reverse=True), top
            same = [logprob for other, logprob in top if other == token]
            assert all(abs(one - own) < CLOSE for one in same) and own < values[0] + CLOSE

    def base_is_another_model(self) -> None:
        base = self.service.create_sampling_client(base_model=BASE).result()
        text = types.ModelInput.from_ints(self.whole)
        of_base = base.compute_logprobs(text).result()
        assert of_base != self.sampler.compute_logprobs(text).result()
        fresh = self.model(seed=3)
        first = fresh.forward([datum(self.whole)], "cross_entropy").result().loss_fn_outputs[0]
        assert np.allclose(first["logprobs"].data, of_base[1:], atol=CLOSE)

    def many_samplers_stay_alive(self) -> None:
        crowd = [self.training.save_weights_and_get_sampling_client().result() for _ in range(12)]
        params = types.SamplingParams(max_tokens=4, seed=1)
        tokens = [c.sample(PROMPT, 1, params).result().sequences[0].tokens for c in [*crowd, *crowd[:2]]]
        assert all(list(one) == list(tokens[0]) for one in tokens)

    def many_requests_at_once(self) -> None:
        params = types.SamplingParams(max_tokens=4)
        made = [self.sampler.sample(PROMPT, 2, params) for _ in range(40)]
        assert len({future.result().sequences[0].sequence_id for future in made}) == 40

    def a_sampler_is_polled_as_a_whole(self) -> None:
        """The door tells its client to poll for each request; both ways are there."""
        made = self.sampler.sample(PROMPT, 1, types.SamplingParams(max_tokens=1)).result()
        target = {"sampling_session_id": self.sampler._sampling_session_id}
        headers = {"X-API-Key": os.environ["TINKER_API_KEY"], "Content-Type": "application/json"}
        address = f"{os.environ['TINKER_BASE_URL']}/api/v1/retrieve_futures"
        asked = urllib.request.Request(address, json.dumps({"target": target}).encode(), headers)
        with urllib.request.urlopen(asked, timeout=60) as answer:
            ended = [one["request_id"] for one in json.load(answer)["completions"]]
        assert made.sequences[0].sequence_id.rpartition(":")[0] in ended, ended

    def losses_of_rl(self) -> None:
        n, old = len(self.whole) - 1, [0.0] * 3 + [float(x) for x in self.sampled.logprobs]
        advantages = [0.0] * 3 + [1.0] * (n - 3)
        inputs = {"logprobs": old, "advantages": advantages}
        settings = {
            "importance_sampling": None,
            "ppo": {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1},
            "cispo": None,
            "dro": {"beta": 0.1},
            "gspo": None,
        }
        for name, config in settings.items():
            more = {"sequence_ratio_mask": [0.0] * 3 + [1.0] * (n - 3)} if name == "gspo" else {}
            work = [datum(self.whole, **inputs, **more)]
            out = self.training.forward_backward(work, name, config).result()
            assert math.isfinite(out.metrics["loss:sum"]), name
            clipped = types.AdamParams(learning_rate=1e-4, grad_clip_norm=1.0)
            assert self.training.optim_step(clipped).result().metrics["grad_norm"] > 0, name

    def targets_need_not_be_the_next_tokens(self) -> None:
        """As the cookbook sends them: 0 where the advantage is 0."""
        n, first = len(self.whole) - 1, self.whole[1:]
        dummy = types.Datum(
            model_input=types.ModelInput.from_ints(self.whole[:-1]),
            loss_fn_inputs={
                "target_tokens": [0] * 3 + first[3:],
                "logprobs": [0.0] * n,
                "advantages": [0.0] * 3 + [1.0] * (n - 3),
            },
        )
        plain = datum(self.whole, logprobs=[0.0] * n, advantages=[0.0] * 3 + [1.0] * (n - 3))
        losses = [
            self.training.forward([one], "importance_sampling").result().metrics["loss:sum"]
            for one in (dummy, plain)
        ]
        assert math.isclose(*losses, rel_tol=1e-5), losses

    def custom_loss(self) -> None:
        def custom(data: Any, logprobs: Any) -> Any:
            total: Any = sum(-one.sum() for one in logprobs)
            return total, {"mine": float(total.detach())}

        out = self.training.forward_backward_custom(DATA, custom).result()
        assert math.isclose(out.metrics["loss:sum"], self.loss(self.training), rel_tol=1e-4)
        self.training.optim_step(types.AdamParams(learning_rate=0.0)).result()

    def mistakes_are_told_and_the_step_behind_refused(self) -> None:
        wrong = [datum(TEXT), datum([10**6] * 4)]
        passed = self.training.forward_backward(wrong, "cross_entropy")
        stepped = self.training.optim_step(types.AdamParams())
        assert "1000000" in refused(passed)
        assert refused(stepped)
        useless = [datum(TEXT, weights=[1.0] * 9, advantages=[1.0] * 9)]
        assert "would change nothing" in refused(self.training.forward_backward(useless, "cross_entropy"))
        refused(self.training.optim_step(types.AdamParams()))
        assert "loss_fn=importance_sampling" in refused(self.training.forward(DATA, "stable_reinforce"))
        self.step(self.training, lr=0.0)

    def a_checkpoint_goes_on_as_the_original(self) -> None:
        saved = self.training.save_state("one", ttl_seconds=3600, user_metadata={"a": "b"}).result().path
        self.saved = saved
        after = self.loss(self.training)
        fork = self.service.create_training_client_from_state_with_optimizer(saved).result()
        plain = self.service.create_training_client_from_state(saved).result()
        assert fork.model_id != self.training.model_id
        assert self.loss(fork) == after and math.isclose(self.loss(plain), after, rel_tol=1e-5)
        steps = []
        for client in (self.training, fork, plain):
            self.step(client)
            steps.append(self.loss(client))
        assert steps[0] == steps[1] != steps[2], steps

    def a_state_is_loaded_into_a_fresh_model(self) -> None:
        loaded = [self.model(seed=21), self.model(seed=22)]
        loaded[0].load_state_with_optimizer(self.saved).result()
        loaded[1].load_state(self.saved).result()
        losses = [self.loss(client) for client in loaded]
        assert math.isclose(*losses, rel_tol=1e-5), losses
        for client in loaded:
            self.step(client)
        one, two = (self.loss(client) for client in loaded)
        assert one != two and math.isclose(one, self.loss(self.training), rel_tol=1e-5)

    def a_named_sampler_stays_as_it_was(self) -> None:
        self.named = self.training.save_weights_for_sampler("one").result().path
        params = types.SamplingParams(max_tokens=6, temperature=0.0)
        first = self.service.create_sampling_client(model_path=self.named).result()
        text = types.ModelInput.from_ints(TEXT)
        before = first.compute_logprobs(text).result()
        self.step(self.training, lr=5e-2)
        later = self.service.create_sampling_client(model_path=self.named).result()
        assert later.compute_logprobs(text).result() == before
        assert later.get_base_model() == BASE and later.sample(PROMPT, 1, params).result().sequences

    def lists(self) -> None:
        runs = self.rest.list_training_runs().result()
        assert self.training.model_id in [run.training_run_id for run in runs.training_runs]
        listed = self.rest.list_checkpoints(self.training.model_id).result().checkpoints
        assert {c.tinker_path for c in listed} == {self.saved, self.named}
        assert [c.expires_at is not None for c in listed if c.tinker_path == self.saved] == [True]
        info = self.rest.get_weights_info_by_tinker_path(self.saved).result()
        assert (info.base_model, info.lora_rank) == (BASE, 8)
        self.rest.set_checkpoint_ttl_from_tinker_path(self.saved, None).result()
        self.rest.publish_checkpoint_from_tinker_path(self.saved).result()
        self.rest.delete_checkpoint_from_tinker_path(self.named).result()
        [left] = self.rest.list_user_checkpoints().result().checkpoints
        assert left.public and left.expires_at is None
        session = self.rest.get_session(self.service.holder.get_session_id()).result()
        assert session.training_run_ids[0] == self.training.model_id

    def a_large_batch_comes_in_parts(self) -> None:
        big = [datum(TEXT[:3]) for _ in range(1100)]  # above 1,024 the client sends the first part last
        out = self.training.forward_backward(big, "cross_entropy").result()
        assert len(out.loss_fn_outputs) == 1100
        one = self.training.forward(big[:1], "cross_entropy").result().metrics["loss:sum"]
        assert math.isclose(out.metrics["loss:sum"], 1100 * one, rel_tol=1e-3)
        self.training.optim_step(types.AdamParams(learning_rate=0.0)).result()

    def two_models_side_by_side(self) -> None:
        """Bit for bit as each alone."""

        def life(client: Any) -> Any:
            return [client.forward_backward(DATA, "cross_entropy") for _ in range(2)], client.optim_step(
                types.AdamParams(learning_rate=1e-2)
            )

        alone = self.model(seed=11)
        life(alone)[1].result()
        pair = [self.model(seed=11), self.model(seed=12)]
        for _, step in [life(client) for client in pair]:
            step.result()
        losses = [self.loss(client) for client in (alone, *pair)]
        assert losses[0] == losses[1] != losses[2], losses

    def other_ranks_and_fewer_modules(self) -> None:
        """Each shares the pool, or waits for one of its own."""
        for rank, parts in ((32, {}), (4, {"train_mlp": False}), (4, {"train_attn": False})):
            client = self.service.create_lora_training_client(BASE, rank=rank, seed=5, **parts).result()
            self.step(client)
            sampler = client.save_weights_and_get_sampling_client().result()
            scored = sampler.compute_logprobs(types.ModelInput.from_ints(TEXT)).result()
            own = client.forward([datum(TEXT)], "cross_entropy").result().loss_fn_outputs[0]
            assert np.allclose(own["logprobs"].data, scored[1:], atol=CLOSE), (rank, parts)

    def refusals_in_words(self) -> None:
        for made, words in (
            (lambda: self.service.create_lora_training_client("no/such", rank=4).result(), "There are:"),
            (lambda: self.service.create_lora_training_client(BASE, rank=10**6).result(), "rank"),
            (lambda: self.rest.copy_weights(self.saved, "project").result(), "copies no checkpoints"),
        ):
            assert words in (said := told(made)), said

    def the_session_ends(self) -> None:
        self.service.close("success").result()


def told(work: Callable[[], Any]) -> str:
    """Return what an error says."""
    try:
        work()
    except Exception as error:
        return str(error)
    raise AssertionError("it was not refused")


def refused(future: Any) -> str:
    """Return what the user is told of a request that fails, as theirs."""
    try:
        future.result()
    except tinker.RequestFailedError as error:
        assert str(error.category).endswith("user") or "user" in repr(error.category).lower(), error.category
        return str(error)
    raise AssertionError("it was not refused")


def main() -> None:
    begun = time.perf_counter()
    checks = Checks()
    names = [name for name, made in vars(Checks).items() if callable(made) and name not in _HELPERS]
    for name in names:
        getattr(checks, name)()
        print(f"{time.perf_counter() - begun:6.2f} {name}", flush=True)
    print(f"all {len(names)} checks hold with tinker {tinker.__version__}", flush=True)


_HELPERS = ("__init__", "model", "loss", "step")

if __name__ == "__main__":
    main()
    os._exit(0)  # the threads of some versions abort a process that ends
