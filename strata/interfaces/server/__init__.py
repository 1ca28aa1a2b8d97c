"""The HTTP service, in OpenAI's and Anthropic's shapes. One engine, which lives in a thread of its own.

The way of a request, in reading order:

    serving, listening, connection   the process, its socket, and what a connection may do
    gate                             who may come in and how much they may send; the log line
    app                              routes and their documentation; json_body: how bodies are read
    schema, text, constraints        what a body says: parameters, prompt and sampling, grammar
    reasoning_budget                 how long it may think
    chat, completions, anthropic/    one for each shape: from its body to a call, from pieces to its answer
    service, generation              limits and counters; a call: the running answers of one request
    worker                           the engine's thread: jobs in, progress out
    formats/, output                 an answer's text as content, reasoning and tool calls
    transport, sse                   an answer onto the connection, whole or as events

Beside it: health, stats and page (what people look at); metrics, engine_figures and speculation (what
Prometheus reads); warm_up and heartbeat (what happens before and between requests); tokenizing, logprobs,
errors, log; and replies (what is answered, for /openapi.json).
"""
