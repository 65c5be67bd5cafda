"""What /metrics shows: Prometheus text, under vLLM's names where the meaning is the same."""

from __future__ import annotations

import time

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest

from day0check.accelerated.server.orders import Times

SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
TOKENS = tuple(float(m * 10**e) for e in range(6) for m in (1, 2, 5))
FINISH = {"stop": "stop", "length": "length", "abort": "abort", "error": "error"}


class Metrics:
    """One registry of its own. `request_finished` and the gauges are called by the engine's thread."""

    def __init__(self, model: str) -> None:
        disable_created_metrics()  # vLLM has no such series
        self.registry, self._model = CollectorRegistry(), model
        self.running = self._gauge("vllm:num_requests_running", "Requests in a step.")
        self.waiting = self._gauge("vllm:num_requests_waiting", "Requests that wait for a slot or pages.")
        self.cache = self._gauge("vllm:kv_cache_usage_perc", "Share of KV pages in use, 0 to 1.")
        self.free_pages = self._gauge("day0check:kv_pages_free", "KV pages that nobody holds.")
        self.free_slots = self._gauge("day0check:state_slots_free", "State slots that nobody holds.")
        self.preemptions = self._counter("vllm:num_preemptions", "Requests that gave their pages back to go on later.")
        self.prompt_tokens = self._counter(
            "vllm:prompt_tokens", "Tokens of prompts that have been computed to their end."
        )
        self.generation_tokens = self._counter("vllm:generation_tokens", "Tokens of answers.")
        self.offloads = self._counter("day0check:offloads", "Preempted requests whose memory went to the host tier.")
        self.prefix_queries = self._counter("vllm:prefix_cache_queries", "Tokens looked for in the prefix cache.")
        self.prefix_hits = self._counter("vllm:prefix_cache_hits", "Tokens found there, which were not computed.")
        self.prefix_blocks = self._counter("day0check:prefix_cache_hit_blocks", "Blocks found in the prefix cache.")
        self.prefix_evicted = self._counter("day0check:prefix_cache_evicted_blocks", "Blocks given up for new pages.")
        self.steps = self._counter("day0check:steps", "Steps of the engine.")
        self._finished = Counter(
            "vllm:request_success", "Requests that ended.", ("model_name", "finished_reason"), registry=self.registry
        )
        self._refused = Counter(
            "day0check:requests_refused", "Requests answered with an error.", ("status",), registry=self.registry
        )
        self._start_up = Gauge("day0check:start_up_seconds", "Of each step.", ("step",), registry=self.registry)
        self.ttft = self._histogram("vllm:time_to_first_token_seconds", "From arrival to the first token.")
        self.itl = self._histogram("vllm:inter_token_latency_seconds", "Between two tokens of an answer.")
        self.tpot = self._histogram("vllm:request_time_per_output_token_seconds", "Mean after the first token.")
        self.e2e = self._histogram("vllm:e2e_request_latency_seconds", "From arrival to the end.")
        self.queue = self._histogram("vllm:request_queue_time_seconds", "From arrival to admission.")
        self.prompt_size = self._histogram("vllm:request_prompt_tokens", "Tokens of the prompt.", TOKENS)
        self.answer_size = self._histogram("vllm:request_generation_tokens", "Tokens of the answer.", TOKENS)
        self.process = self._gauge("process_start_time_seconds", "Unix time of the start.")
        self.process.set(time.time())

    def counted(self) -> tuple[Counter, ...]:
        """The counters that follow the scheduler's own, in its order."""
        return (
            self.preemptions,
            self.prompt_tokens,
            self.generation_tokens,
            self.offloads,
            self.prefix_queries,
            self.prefix_hits,
            self.prefix_blocks,
            self.prefix_evicted,
        )

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(name, text, ("model_name",), registry=self.registry).labels(self._model)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, ("model_name",), registry=self.registry).labels(self._model)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...] = SECONDS) -> Histogram:
        return Histogram(name, text, ("model_name",), registry=self.registry, buckets=buckets).labels(self._model)

    def start_up(self, step: str, seconds: float) -> None:
        self._start_up.labels(step).set(seconds)

    def refused(self, status: int) -> None:
        self._refused.labels(str(status)).inc()

    def request_finished(self, reason: str, times: Times, *, prompt_tokens: int, completion_tokens: int) -> None:
        """`reason`: "stop", "length", "abort" or "error". Latencies are those of answers that came to their end."""
        now = time.monotonic()
        self._finished.labels(self._model, FINISH[reason]).inc()
        if times.admitted:
            self.queue.observe(times.admitted - times.arrived)
            self.prompt_size.observe(prompt_tokens)
        self.answer_size.observe(completion_tokens)
        for gap in times.gaps:
            self.itl.observe(gap)
        if reason not in ("stop", "length"):
            return
        self.e2e.observe(now - times.arrived)
        if times.first_token:
            self.ttft.observe(times.first_token - times.arrived)
        if times.gaps:
            self.tpot.observe(sum(times.gaps) / len(times.gaps))

    def text(self) -> bytes:
        return generate_latest(self.registry)
