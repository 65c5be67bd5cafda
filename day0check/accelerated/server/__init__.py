"""The engine as a service: an OpenAI-compatible server around one live scheduler in a thread of its own.

    orders       records between the HTTP side and the engine's thread
    operators    the serve family: detokenise, stop, reasoning, tool_call, logprobs (contracts/serve.py)
    live         the scheduler that requests join and leave at any time; answer: one request's tokens to text
    start_up     what must hold before it is ready; engine_thread: steps of the start, then steps of the scheduler
    schema, parsing, planning, images, chat, vocabulary    from bytes of a request to orders, or to a refusal
    replies      from events to OpenAI's JSON; a whole answer is its chunks put together
    http, listening    routes, limits, streams; sockets, signals, draining

Beside OpenAI's fields a request may hold vLLM's `ignore_eos`, `stop_token_ids`, `prompt_logprobs`, `return_token_ids`,
`return_tokens_as_token_ids`, `stream_options.continuous_usage_stats`, and ours: `forced_token_ids`, tokens that the
answer begins with whatever the model chooses, so that any text can be sent through the whole way out.
"""
