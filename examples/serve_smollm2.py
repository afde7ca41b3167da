"""Serve many prompts at once with kvlab's pages: continuous batching over one pool, on a GPU or a CPU.

Every step prefills a chunk of a waiting prompt and writes one token of each running one. Prompts that begin alike share
pages; where the pool runs out, the youngest request gives its pages back and is computed anew later. At the end the
outputs are held against those of transformers, one request at a time with its own attention and cache.

    python examples/serve_smollm2.py                           # random weights of SmolLM2's shape, cut to few layers
    python examples/serve_smollm2.py --weights HuggingFaceTB/SmolLM2-135M-Instruct    # or a folder, or a file .gguf

On a GPU the step of the running requests is a CUDA graph. Needs the extras ``kernels``, ``models`` and, for the
picture, ``notebooks``.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, LlamaConfig, LlamaForCausalLM

from kvlab.cache import OutOfPages
from kvlab.integrations.transformers import CACHE_ARGUMENT, KVLabCache, register

SHAPE = {"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3}
SYSTEM = (
    "You are a librarian at a small desk beside the door. You answer in one short sentence, kindly, and you never "
    "mention the cellar unless a reader asks for it."
)
QUESTIONS = (
    "What is a page table?", "Name three rivers of Europe.", "Why is the sky blue?", "What is 12 times 7?",
    "List the days of the week.", "Write a line of a poem about snow.", "What does a cache keep?", "Who wrote Faust?",
)


@dataclass(eq=False)
class Request:
    """A prompt on its way to ``limit`` tokens; what was written stands behind it in ``tokens``."""

    number: int
    tokens: list[int]
    limit: int
    prompt: int = field(init=False)
    sequence: int | None = None
    times: list[float] = field(default_factory=list)  # when each new token was there, seconds
    spans: list[tuple[float, float]] = field(default_factory=list)  # when it held pages

    def __post_init__(self) -> None:
        self.prompt = len(self.tokens)

    def ended(self, stop: int | None) -> bool:
        written = self.tokens[self.prompt :]
        return len(written) == self.limit or bool(written and written[-1] == stop)


class Server:
    """Continuous batching: ``slots`` requests at a time, ``chunk`` tokens of prefill a step."""

    def __init__(
        self, model: Any, cache: KVLabCache, *, slots: int, chunk: int, stop: int | None, sharing: bool = True
    ) -> None:
        self.model, self.cache, self.pool = model, cache, cache.pages.pool
        self.chunk, self.stop, self.sharing = chunk, stop, sharing
        self.slots: list[Request | None] = [None] * slots
        self.waiting: list[Request] = []
        self.batch = cache.of([None] * slots)  # one cache for all steps: its arrays stay where they are
        self.ids = torch.zeros(slots, 1, dtype=torch.long, device=model.device)
        self.positions = torch.zeros_like(self.ids)
        self.graph: Any = None
        self.logits: Any = None
        self.steps = self.preempted = self.shared = 0
        self.used: list[tuple[float, int]] = []  # pages that are held, after each step

    @torch.inference_mode()
    def run(self, requests: Sequence[Request]) -> float:
        """Serve all requests, which are there from the start. Returns seconds."""
        self.waiting, self.start = list(requests), time.perf_counter()
        while self.waiting or any(self.slots):
            for slot, held in enumerate(self.slots):
                if held is None and self.waiting:
                    self.slots[slot] = self.waiting.pop(0)
            self._prefill()
            self._decode()
            self.steps += 1
            self.used.append((self._now(), self.pool.num_pages - self.pool.num_free))
        return self._now()

    def _now(self) -> float:
        return time.perf_counter() - self.start

    def _stored(self, request: Request) -> int:
        return 0 if request.sequence is None else self.pool.length(request.sequence)

    def _running(self) -> list[Request]:
        return [r for r in self._holders() if self._stored(r) == len(r.tokens) - 1]

    def _holders(self) -> list[Request]:
        """Requests that hold pages, the oldest first."""
        held = [r for r in self.slots if r is not None and r.sequence is not None]
        return sorted(held, key=lambda r: r.number)

    def _prefill(self) -> None:
        """A chunk of the oldest request whose tokens are not all stored, and of the next, while the chunk has room."""
        left, running = self.chunk, self._running()
        unread = [r for r in self.slots if r is not None and r not in running]
        for request in sorted(unread, key=lambda r: r.number):
            if left == 0 or (request.sequence is None and not self._begin(request)):
                return
            first = self._stored(request)
            part = request.tokens[first : first + left]
            try:
                view = self.cache.of([request.sequence])
                ids = torch.tensor([part], device=self.ids.device)
                logits = self.model(ids, **{CACHE_ARGUMENT: view}, logits_to_keep=1).logits
            except OutOfPages:
                if len(self._holders()) == 1:
                    raise
                return  # others hold the pages: it waits for them
            left -= len(part)
            if first + len(part) == len(request.tokens):
                self._write(request, int(logits[0, -1].argmax()))

    def _begin(self, request: Request) -> bool:
        """Give the request a sequence that shares the longest beginning which another one has stored, but for its last
        token; False where there are no pages for the rest, and others hold some."""
        source, shared, tokens = None, self.pool.page_size - 1, request.tokens
        for other in self._holders() if self.sharing else ():
            there = other.tokens[: self._stored(other)]
            pairs = enumerate(zip(there, tokens[:-1], strict=False))
            alike = next((i for i, (a, b) in pairs if a != b), min(len(there), len(tokens) - 1))
            if alike > shared:
                source, shared = other.sequence, alike
        if source is None:
            shared = 0
        rest = -(-len(tokens) // self.pool.page_size) - shared // self.pool.page_size
        if rest > self.pool.num_free and self._holders():
            return False
        request.sequence = self.pool.allocate(0)[0] if source is None else self.pool.fork(source, shared)
        request.spans.append((self._now(), 0.0))
        self.shared += shared
        return True

    def _decode(self) -> None:
        """One more token of every request whose others are stored."""
        while running := self._running():
            self.batch.sequences[:] = [r.sequence if r is not None and r in running else None for r in self.slots]
            try:
                self.batch.begin(1, self.ids.device)
                break
            except OutOfPages:
                self._preempt()
        else:
            return
        rows = [(0, 0) if r is None or r not in running else (r.tokens[-1], len(r.tokens) - 1) for r in self.slots]
        for array, values in zip((self.ids, self.positions), zip(*rows, strict=True), strict=True):
            array.copy_(torch.tensor(values)[:, None])
        tokens = self._forward().argmax(-1).tolist()
        for request, token in zip(list(self.slots), tokens, strict=True):
            if request is not None and request in running:
                self._write(request, token)

    def _forward(self) -> torch.Tensor:
        """Logits ``[slots, vocabulary]`` of the step begun last: the second is captured, later ones replayed."""
        def forward() -> Any:
            return self.model(self.ids, position_ids=self.positions, **{CACHE_ARGUMENT: self.batch}).logits[:, -1]

        if self.ids.device.type != "cuda":
            return forward()
        if self.graph is None:
            self.graph = torch.cuda.CUDAGraph()
            return forward()  # compiles the kernels
        if self.logits is None:
            with torch.cuda.graph(self.graph):
                self.logits = forward()
        self.graph.replay()
        return self.logits

    def _write(self, request: Request, token: int) -> None:
        request.tokens.append(token)
        request.times.append(self._now())
        if request.ended(self.stop):
            self._leave(request)

    def _leave(self, request: Request) -> None:
        if request.sequence is not None:
            self.pool.free(request.sequence)
            request.spans[-1] = request.spans[-1][0], self._now()
        request.sequence = None
        self.slots[self.slots.index(request)] = None

    def _preempt(self) -> None:
        """The youngest request that holds pages gives them back, and waits again."""
        *others, youngest = self._holders()
        if not others:
            raise OutOfPages(f"request {youngest.number} alone needs more than the {self.pool.num_pages} pages")
        self._leave(youngest)
        self.waiting.insert(0, youngest)
        self.preempted += 1


@torch.inference_mode()
def one_by_one(model: Any, request: Request, stop: int | None) -> list[int]:
    """What transformers writes for the prompt alone, with its own attention and cache."""
    model.set_attn_implementation("sdpa")
    tokens, cache = list(request.tokens[: request.prompt]), DynamicCache(config=model.config)
    ids = torch.tensor([tokens], device=model.device)
    for _ in range(request.limit):
        ids = model(ids, **{CACHE_ARGUMENT: cache}).logits[:, -1:].argmax(-1)
        tokens.append(int(ids))
        if tokens[-1] == stop:
            break
    return tokens


def random_model(layers: int, vocabulary: int, device: str) -> Any:
    """SmolLM2's shape with random weights: few layers, few words."""
    torch.manual_seed(0)
    config = LlamaConfig(**SHAPE, num_hidden_layers=layers, vocab_size=vocabulary, tie_word_embeddings=True)
    model = LlamaForCausalLM(config).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.06)  # wide enough that the best word is far ahead of the next
    return model.to(device)


def load(weights: str, device: str) -> tuple[Any, Any]:
    """(model, tokenizer) of a name, a folder or a .gguf file, in float32."""
    path = Path(weights)
    more = {"gguf_file": path.name} if path.suffix == ".gguf" else {}
    place = path.parent if more else weights
    model = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32, **more)
    return model.to(device).eval(), AutoTokenizer.from_pretrained(place, **more)


def random_prompts(count: int, vocabulary: int) -> list[list[int]]:
    """Prompts that begin with the same 40 tokens and go on for 5 to 44."""
    draw = torch.Generator().manual_seed(1)
    common = torch.randint(vocabulary, (40,), generator=draw).tolist()
    return [common + torch.randint(vocabulary, (5 + i * 11 % 40,), generator=draw).tolist() for i in range(count)]


def chats(tokenizer: Any, count: int) -> list[list[int]]:
    """Questions to the same librarian."""
    prompts = []
    for i in range(count):
        asked = QUESTIONS[i % len(QUESTIONS)] + (f" ({i // len(QUESTIONS) + 1})" if i >= len(QUESTIONS) else "")
        chat = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": asked}]
        prompts.append(tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"])
    return prompts


def draw(server: Server, requests: Sequence[Request], file: Path) -> None:
    """Which request held pages when, when it wrote its tokens, and how full the pool was."""
    from matplotlib.figure import Figure

    figure = Figure((9, 7), layout="constrained")
    above, below = figure.subplots(2, sharex=True, height_ratios=(3, 1))
    for request in requests:
        for first, last in request.spans:
            above.barh(request.number, last - first, left=first, height=0.8, color="#c9d7ea")
    times = [(t, r.number) for r in requests for t in r.times]
    above.scatter(*zip(*times, strict=True), s=3, color="#1f4e8c")
    above.set(ylabel="request", title="Held pages (bars) and wrote tokens (dots)")
    above.invert_yaxis()
    below.plot(*zip(*server.used, strict=True), color="#1f4e8c")
    below.axhline(server.pool.num_pages, color="#b23b3b", linestyle=":")
    below.set(xlabel="seconds", ylabel="pages held", ylim=0)
    figure.savefig(file, dpi=120)


def report(server: Server, requests: Sequence[Request], seconds: float) -> str:
    """Throughput and latency, in lines to print."""
    first = torch.tensor([r.times[0] for r in requests])
    last = torch.tensor([r.times[-1] for r in requests])
    between = torch.cat([torch.tensor(r.times).diff() for r in requests])
    written = sum(len(r.times) for r in requests)

    def of(name: str, values: torch.Tensor) -> str:
        middle, late = torch.quantile(values, torch.tensor([0.5, 0.95])).tolist() if len(values) else (0.0, 0.0)
        return f"{name:<22} {middle:8.3f} s median, {late:8.3f} s for 95 of 100"

    return "\n".join([
        f"{len(requests)} requests, {written} tokens in {seconds:.1f} s and {server.steps} steps: "
        f"{written / seconds:.1f} tokens a second",
        of("first token", first), of("last token", last), of("between tokens", between),
        f"{server.shared} tokens of prompts shared, {server.preempted} pre-emptions, at most "
        f"{max(n for _, n in server.used)} of {server.pool.num_pages} pages of {server.pool.page_size} tokens held",
    ])


def options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--weights", help="a name, a folder or a .gguf file; random weights if left out")
    parser.add_argument("--device", default=device, help="default: %(default)s")
    parser.add_argument("--backend", help="of kvlab; default: auto on a GPU, else reference, the fastest on a CPU")
    parser.add_argument("--plot", type=Path, help="where to draw a picture (.png, .svg)")
    for name, default, what in (
        ("requests", 32, "prompts that are there from the start"), ("new-tokens", 16, "most tokens written for each"),
        ("slots", 32, "requests at a time"), ("pages", 88, "of the pool"), ("page-size", 16, "tokens of a page"),
        ("chunk", 64, "tokens of prefill in a step"), ("layers", 2, "of random weights"),
        ("vocabulary", 4096, "of random weights"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{what}; default: %(default)s")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> tuple[Server, list[Request]]:
    args = options(arguments)
    register(backend=args.backend or ("auto" if args.device == "cuda" else "reference"))
    stop = tokenizer = None
    if args.weights:
        model, tokenizer = load(args.weights, args.device)
        stop, prompts = tokenizer.eos_token_id, chats(tokenizer, args.requests)
    else:
        model = random_model(args.layers, args.vocabulary, args.device)
        prompts = random_prompts(args.requests, args.vocabulary)
    model.set_attn_implementation("kvlab")
    requests = [Request(i, list(prompt), args.new_tokens) for i, prompt in enumerate(prompts)]
    longest = max(map(len, prompts)) + args.new_tokens
    cache = KVLabCache(model.config, num_pages=args.pages, page_size=args.page_size, max_length=longest)
    server = Server(model, cache, slots=args.slots, chunk=args.chunk, stop=stop)
    print(report(server, requests, server.run(requests)))
    if args.plot:
        draw(server, requests, args.plot)
        print(f"picture: {args.plot}")
    if tokenizer is not None:
        print(*(repr(tokenizer.decode(r.tokens[r.prompt :])) for r in requests[:4]), sep="\n")
    other = [r.number for r in requests if one_by_one(model, r, stop) != r.tokens]
    if other:
        raise SystemExit(f"requests {other} wrote other tokens than one by one")
    print(f"all {len(requests)} outputs are those of transformers' own attention, one by one")
    return server, requests


if __name__ == "__main__":
    main()
