"""Settings of generation: how samples are made, on which engine, and the endpoint for agents.

Owns what an engine, or a server of SGLang, is asked for. Does not own what samples are judged by (`data.py`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from rondo.roles.config.data import NewTokens, TopK, TopP
from rondo.roles.engines import ranges
from rondo.roles.sampling import code_tools, media_tools
from rondo.runtime.config import unguarded
from rondo.runtime.section import FREE, FunctionRef, Section, fixed, may_hold_secret, nearest

MIN_FIXED_SLOTS = 4
"""Rows of a float32 product from which a row's bits do not depend on how many there are."""

PAUSES: Mapping[str, str] = {"continue": "in_place", "recompute": "retract", "interrupt": "abort"}
"""`rollout.on_new_weights` in the words of SGLang's pause modes."""


_SECRET = re.compile(r"(^|[_-])(token|key|secret|password|passwd|credentials?)$", re.IGNORECASE)
"""Names of what holds one, such as HF_TOKEN and WANDB_API_KEY, and not TOKENIZERS_PARALLELISM."""


class SGLangConfig(Section):
    """SGLang as the rollout engine: servers that each rollout replica starts, or ones that run already."""

    place = "sglang"
    python: Annotated[str | None, FREE] = None
    """The interpreter of the server's own environment. The servers are started with it."""
    urls: Annotated[tuple[str, ...], FREE] = ()
    """Or servers that run already ("http://127.0.0.1:30000"); rondo neither starts nor ends these."""
    router: Annotated[str | None, FREE] = None
    """A public router (sglang-router, smg) in front of all `urls`, through which requests go; without, rondo spreads them."""
    num_servers: Annotated[int, FREE] = Field(1, ge=1)
    """Servers that each rollout replica starts."""
    tensor_parallel: int = Field(1, ge=1)
    """Devices of one server."""
    arguments: dict[str, str | int | float | bool] = Field(default_factory=dict)
    """Further arguments of the server by their names, such as {"mem-fraction-static": 0.8}; True stands for a flag."""
    environment: Annotated[dict[str, str], FREE] = Field(default_factory=dict)
    """Further environment variables of the servers, which have those of the run too. No secrets: they are saved and shown."""
    api_key_file: Annotated[str | None, FREE] = None
    """A file with the bearer key of `urls`; servers that rondo starts get a key of their own."""
    weights: Annotated[Literal["disk", "tensor", "distributed"], FREE] = "disk"
    """How new weights reach a server: files, shared memory or CUDA IPC on this node, or a process group."""
    pause: Literal["in_place", "retract", "abort"] = "in_place"
    """What a weight update does to requests in flight: 'in_place' freezes them and goes on with the cache that the old weights
    filled, 'retract' takes them back and computes their cache anew, 'abort' ends them, to be continued as new requests."""
    bucket_bytes: Annotated[int, FREE] = Field(256 << 20, ge=1 << 16)
    """Weights of one update call."""
    checksums: Annotated[bool, FREE] = True
    """Compares the server's checksums of its weights with ours after every update, while it pauses; without, an update is proved
    by its version alone."""
    release_memory: Annotated[bool | None, FREE] = None
    """Servers give their memory back while the trainer of the same process trains, and take it for the next weights; None: where
    they share its device, and the two take turns."""
    start_deadline_s: Annotated[float, FREE] = Field(600.0, gt=0)
    """What a server may take from its start until it answers."""
    silent_deadline_s: Annotated[float, FREE] = Field(300.0, gt=0)
    """A server that is not updated and does not sleep, and makes no token for its requests for so long, is started again; one
    that answers nothing at all, sooner (`sglang/silence.py`)."""
    update_deadline_s: Annotated[float | None, FREE] = Field(None, gt=0)
    """One server's weight update; None: four times what updates took so far, and ten minutes or more for the first one."""

    @property
    def num_devices(self) -> int:
        """Of a replica: those of the servers that it starts; with servers that run already, the one that a process group sends
        from."""
        return int(self.weights == "distributed") if self.urls else self.num_servers * self.tensor_parallel

    def refused(self) -> Iterator[str]:
        if (self.python is None) == (not self.urls):
            yield (
                "sglang.python and sglang.urls must be set one without the other, "
                f"got {'neither' if self.python is None else 'both'}. Set sglang.python to start servers, or sglang.urls"
            )
        for name in filter(_SECRET.search, (*self.environment, *self.arguments)):
            yield (
                f"sglang.environment and sglang.arguments must hold no secret, since settings are saved and shown, got {name}. "
                "Export it before the run starts: servers have the run's environment, and a key of their own"
            )
        if any(map(may_hold_secret, self.urls)):
            yield (
                "sglang.urls must hold no password and no query, since settings are saved and shown, got something before an @ "
                "or behind a ?. Put a key into the file of sglang.api_key_file"
            )
        if self.release_memory and self.urls:
            yield (
                "sglang.release_memory must not be True with sglang.urls, whose servers have devices of their own and may answer "
                "others, got True. Remove it"
            )
        if self.router is not None and not self.urls:
            yield (
                "sglang.router must come with sglang.urls, the servers behind it, which get their weights past it, got none. "
                "Name them, or remove sglang.router: rondo spreads requests over the servers that it starts"
            )
        if self.router is not None and (self.weights != "disk" or self.checksums):
            yield (
                "sglang.router must come with sglang.weights 'disk' and sglang.checksums False, since its servers are updated "
                f"with the same calls, got {self.weights!r} and {self.checksums}. Change them, or remove sglang.router"
            )


class ListenConfig(Section):
    """Where a server of each rollout replica listens, and who may ask it."""

    section: ClassVar[str] = "rollout.agent.elsewhere"
    host: str = "127.0.0.1"
    """Address that it listens at; any but loopback asks for a token."""
    port: int = Field(0, ge=0, le=65535)
    """Replica 0 listens here, replica 1 one port further, and so on; 0 takes free ones. `rondo status` says where."""
    token_file: Path | None = None
    """A file (mode 0600) with the token that callers show. Without it they show the run's own, which can also stop the run."""
    tls_cert: Path | None = None
    """A certificate (PEM), with those that lead to its root behind it: the server speaks TLS, 1.2 or newer."""
    tls_key: Path | None = None
    """Its key (PEM, mode 0600, without a password)."""

    def refused(self) -> Iterator[str]:
        yield from unguarded(self.section, self.host, self.token_file, self.tls_cert, self.tls_key)


class EndpointConfig(ListenConfig):
    """An HTTP server on each rollout replica's engine for agents, in OpenAI's and SGLang's words."""

    section = "rollout.endpoint"
    max_body_bytes: int | None = Field(None, ge=1 << 10)
    """None: 32 bytes for every token that fits into a sequence, and at least 4 MiB."""
    prompt_workers: int = Field(1, ge=1)
    """Processes that render and tokenise prompts: so many for short ones, and as many for long ones."""
    max_sessions: int = Field(4096, ge=1)
    """Sessions whose trajectories are kept; a call of one more is refused."""
    max_bytes: int = Field(1 << 30, ge=1)
    """Of all trajectories together; once they have more, calls of sessions are refused."""
    max_session_bytes: int = Field(1 << 26, ge=1)
    """Of one session's trajectory; once it has more, its calls are refused."""
    max_age_s: float = Field(3600.0, gt=0)
    """A session's trajectory goes so long after its last call."""
    idle_s: float = Field(300.0, gt=0)
    """So long after its last call it goes too, where others need its room."""


SINGLE_TURN = "rondo.roles.sampling.single_turn:single_turn"


def _by_name(tool: object) -> object:
    if isinstance(tool, str) and ":" not in tool and tool not in (known := [*code_tools.NAMES, *media_tools.NAMES]):
        raise ValueError(
            f"must be a function, its reference 'module:function', or a tool with a name, got {tool!r}. {nearest(tool, known)}"
        )
    homes = [home.__name__ for home in (code_tools, media_tools) if tool in home.NAMES]
    return f"{homes[0]}:{tool}" if homes else tool


def _game(factory: object) -> object:
    return "rondo.roles.sampling.text_games:TextGame" if factory == "textarena" else factory


class McpConfig(Section):
    """A server of the Model Context Protocol, whose tools the policy may call."""

    place = "environment.mcp"
    command: tuple[str, ...] = ()
    """Starts it in the rollout process, which it talks to over standard input and output."""
    url: str | None = None
    """Or where it runs already: streamable HTTP."""
    environment: dict[str, str] = Field(default_factory=dict)
    """Environment variables of the command, besides the run's own."""
    only: tuple[str, ...] | None = None
    """Tools that are shown; None: all."""

    def refused(self) -> Iterator[str]:
        if bool(self.command) == (self.url is not None):
            yield (
                "a server of environment.mcp must have a command or a url, one without the other, got "
                f"{'both' if self.command else 'neither'}. Set one"
            )
        if self.environment and not self.command:
            yield "environment.mcp must have no environment with a url, whose server has its own, got some. Remove it"
        for name in filter(_SECRET.search, self.environment):
            yield (
                f"environment.mcp must hold no secret in environment, since settings are saved and shown, got {name}. Export it "
                "before the run starts: servers have the run's environment"
            )
        if self.url is not None and may_hold_secret(self.url):
            yield (
                "environment.mcp must hold no password and no query in url, since settings are saved and shown, got something "
                "before an @ or behind a ?. Remove it"
            )


class EnvironmentConfig(Section):
    """Who answers the policy between its turns: an environment of each sample, tools, or both."""

    place = "environment"
    factory: Annotated[FunctionRef, BeforeValidator(_game)] | None = None
    """A class, or a function without parameters, that makes the environment of a sample (`roles/sampling/environments.py`);
    "textarena" plays the games that rows of 'textarena:NAME' say."""
    tools: tuple[Annotated[FunctionRef, BeforeValidator(_by_name)], ...] = ()
    """Functions with type hints and docstrings that the policy may call: plain ones run in killable processes, async ones in the
    rollout process, each call by itself. "python" and "shell" run what it wrote in the sandbox; "zoom", "listen" and "seek" show
    parts of the media of the question, and "python_with_media" runs programs on them."""
    mcp: dict[str, McpConfig] = Field(default_factory=dict)
    """MCP servers by names of yours, whose tools are among these; each rollout process has its own connection."""
    num_workers: int = Field(2, ge=1)
    """Processes of the plain tools."""
    max_threads: int = Field(64, ge=1)
    """Plain methods of environments that run at once; further ones wait."""
    deadline_s: float = Field(60.0, gt=0)
    """Of one call. A tool beyond it is an error that the policy is told of; an environment beyond it fails its sample."""

    def refused(self) -> Iterator[str]:
        if self.factory is None and not self.tools and not self.mcp:
            yield "environment.factory, tools or mcp must be set, got none of them. Set one, or remove environment"


class AgentConfig(Section):
    """A program that makes each sample: it speaks to the policy over HTTP as to any model; what it is answered is trained."""

    place = "agent"
    command: tuple[str, ...] = ()
    """Started once a sample. Its environment says where to ask, and where its row is (docs/agents.md)."""
    elsewhere: ListenConfig | None = None
    """Or programs that run elsewhere ask here for samples to make: `rondo agents`, or any HTTP client."""
    deadline_s: float = Field(600.0, gt=0)
    """From the start of a process, or from when somebody took a sample. Beyond it that has failed, and a process is killed with
    all that it started."""
    taken_deadline_s: float = Field(3600.0, gt=0)
    """A sample that nobody elsewhere has taken for so long has failed."""
    max_processes: int = Field(64, ge=1)
    """Samples that are made at once for a rollout process; further ones wait."""
    other_sampling: bool = False
    """Answers requests for another temperature, top_p or top_k than the run's, under the run's; else they are refused."""

    def refused(self) -> Iterator[str]:
        if bool(self.command) == (self.elsewhere is not None):
            yield (
                "agent.command and agent.elsewhere must be set one without the other, got "
                f"{'both' if self.command else 'neither'}. Set agent.command to start programs here, or agent.elsewhere"
            )


class RolloutConfig(Section):
    """What is sampled for a step, and under which limits. Lengths are in tokens."""

    prompts_per_step: int = Field(ge=1)
    """Prompt groups that a step trains on."""
    samples_per_prompt: Annotated[int, fixed("its ledger counts prompt groups of so many samples")] = Field(ge=1)
    """Answers in a prompt group."""
    max_prompt_tokens: int = Field(ge=1)
    """Longest prompt; `data.too_long` says what becomes of longer ones."""
    max_new_tokens: NewTokens
    """Longest answer; a longer one is cut off."""
    temperature: Annotated[float, AfterValidator(replace(ranges.TEMPERATURE, off=None).check)] = 1.0
    """Of the sampling; the loss computes log-probs under it too."""
    top_p: TopP = 1.0
    """Nucleus to sample from; 1 is all tokens."""
    top_k: TopK = -1
    """-1 samples from all tokens."""
    stop: tuple[str, ...] = ()
    """Texts that end a response where they are complete, besides every end of sequence of the model's generation config and its
    tokenizer. They stay part of the response: their tokens are trained, and the reward sees them."""
    workflow: FunctionRef = SINGLE_TURN
    """`async def workflow(row, client, context)`: makes the samples of a prompt group, for training and evaluation alike."""
    environment: EnvironmentConfig | None = None
    """An environment or tools, in the place of a workflow."""
    agent: AgentConfig | None = None
    """A program of your own that makes the samples, in the place of a workflow."""
    max_turns: int | None = Field(None, ge=1)
    """Most turns of a sample: answers of the policy, with what is said to it between them."""
    max_rows: int = Field(1, ge=1)
    """Most rows of a sample, each of `max_prompt_tokens` + `max_new_tokens` at most: 1 where every turn goes on behind the last
    one; more where contexts are replaced, agents talk beside each other, or the chat template rewrites earlier turns."""
    max_episode_s: float | None = Field(None, gt=0)
    """A sample that takes longer ends as far as it came, as aborted."""
    max_episodes: Annotated[int | None, FREE] = Field(None, ge=1)
    """Samples that a replica has in hand at once, with those that wait for their environments and need no place at the engine.
    None: as many as keep the engine busy, and of `agent` twice its `max_processes`."""
    num_slots: Annotated[int, FREE] = Field(64, ge=1)
    """Sequences that one engine decodes at once."""
    sglang: SGLangConfig | None = None
    """Generate with SGLang servers; without it the engine inside the rollout process does."""
    endpoint: Annotated[EndpointConfig | None, FREE] = None
    """Answers agents over HTTP beside the run's own samples, with its newest weights."""
    min_engines: Annotated[int, FREE] = Field(1, ge=0)
    """Fewest healthy engines, over all replicas: below, the run says so and waits; above, it goes on with what there is."""
    min_engines_deadline_s: Annotated[float, FREE] = Field(1800.0, gt=0)
    """How long the run waits below `min_engines`."""
    below_min_engines: Annotated[Literal["stop", "fail"], FREE] = "stop"
    """After that time: 'stop' saves and leaves (75, to be resumed), 'fail' ends the run with that as its cause."""
    filter: Literal["zero_std"] | None = None
    """'zero_std' replaces prompt groups whose rewards are all equal."""
    keep: FunctionRef | None = None
    """`def keep(samples) -> bool`: replaces prompt groups for which it says False. Each sample is a dict with `reward` (None: it
    failed), `finish_reason` and `num_tokens`."""
    spare_groups: int = Field(0, ge=0)
    """Prompt groups sampled beyond a step's need; the last to finish are dropped."""
    max_consecutive_filtered: Annotated[int, FREE] = Field(1000, ge=1)
    """More filtered prompt groups in a row than this end the run."""
    max_consecutive_failed: Annotated[int, FREE] = Field(100, ge=1)
    """More failed or quarantined prompt groups in a row than this end the run, with the last error as its cause."""
    on_new_weights: Literal["continue", "recompute", "interrupt"] = "continue"
    """What becomes of samples in flight when new weights come: 'continue' goes on with the cache that the old ones filled,
    'recompute' fills it anew at once, 'interrupt' hands them back, to be taken up again from where they were."""
    max_interruptions: int | None = Field(None, ge=1)
    """A sample that was recomputed or interrupted so often goes on in place; None: as often as new weights come."""
    mask_old_tokens: bool = False
    """Leaves tokens out of the loss that are older than the newest version among their sample's tokens."""
    mask_truncated: bool = False
    """Leaves samples that `max_new_tokens` cut off out of the loss; their rewards still count in their prompt group."""
    lease_deadline_s: Annotated[float, FREE] = Field(120.0, gt=0)
    """A prompt group of whose requests and rewards none comes further for so long is granted again, to any replica."""
    straggler_deadline_s: float | None = Field(None, gt=0)
    """A prompt group that a step waits for longer than this counts as failed; None waits."""

    @property
    def has_turns(self) -> bool:
        """Whether something may be said behind a prompt."""
        return self.environment is not None or self.workflow != SINGLE_TURN

    @property
    def num_slots_of_replica(self) -> int:
        """Sequences that all engines of a replica decode at once: the servers that it starts or is told of, or its own."""
        servers = self.sglang
        return self.num_slots * (1 if servers is None else len(servers.urls) or servers.num_servers)

    def refused(self) -> Iterator[str]:
        if self.environment is not None and self.workflow != SINGLE_TURN:
            yield (
                "rollout.workflow must not be set with rollout.environment, which brings its own, "
                f"got {self.workflow}. Remove one of them"
            )
        if self.environment is not None and self.max_turns is None and self.max_episode_s is None:
            yield (
                "rollout.max_turns must be set with rollout.environment, or rollout.max_episode_s, so that samples end, got "
                "neither. Set the most turns of a sample"
            )
        if self.agent is not None:
            own = {
                "workflow": self.workflow != SINGLE_TURN,
                "environment": self.environment,
                "max_episode_s": self.max_episode_s,
            }
            for name in (name for name, given in own.items() if given):
                instead = (
                    "whose deadline_s ends samples" if name == "max_episode_s" else "which makes the samples itself"
                )
                yield f"rollout.{name} must not be set with rollout.agent, {instead}, got a value. Remove one of them"
        if "" in self.stop:
            yield "rollout.stop must hold texts of one character or more, got an empty one. Remove it"
        if self.top_k == 1:
            yield (
                "rollout.top_k must leave more than one token to draw from, since samples of a prompt are equal else and teach "
                "nothing, got 1. Remove it"
            )
        if self.max_interruptions is not None and self.on_new_weights == "continue":
            yield (
                "rollout.max_interruptions must not be set with rollout.on_new_weights 'continue', which interrupts nothing, "
                f"got {self.max_interruptions}. Set rollout.on_new_weights to 'recompute' or 'interrupt', or remove it"
            )
        if self.sglang is not None and (paused := PAUSES[self.on_new_weights]) != self.sglang.pause:
            yield (
                f"rollout.sglang.pause must be {paused!r} with rollout.on_new_weights {self.on_new_weights!r}, since a server "
                f"does the same to all its requests, got {self.sglang.pause!r}. Change one of them"
            )
        if self.sglang is not None and self.max_interruptions is not None:
            yield (
                "rollout.max_interruptions must be None with rollout.sglang, whose servers do not count them, "
                f"got {self.max_interruptions}. Remove it"
            )
        if self.straggler_deadline_s is not None and self.straggler_deadline_s < self.lease_deadline_s:
            yield (
                "rollout.straggler_deadline_s must be at least rollout.lease_deadline_s, "
                f"got {self.straggler_deadline_s} and {self.lease_deadline_s}. A lost lease needs time to be noticed"
            )
