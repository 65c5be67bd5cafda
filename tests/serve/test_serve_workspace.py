"""Prompts behind long prefixes through a served engine's workspace."""

from serve_client import make_engine, running, served

from day0check.probe.registry import Registration

LONG = "Tides of the sea come twice a day, and nobody asked them to; but when the moon is near they rise the higher."


def test_a_small_workspace_gives_the_same_answers():
    """Catches a workspace that the server does not pass on, and other answers behind prefixes in chunks."""
    answers, merged = [], []

    def merge(inner, parts, *, lse):
        merged.append(parts.shape[1])
        return inner(parts, lse=lse)

    for rows in (None, 24):
        engine = make_engine(
            Registration("wrap", "mla.merge", merge),
            model="tiny-kimi-k2.5",
            page=8,
            chunk=16,
            max_batch=2,
            max_model_len=160,
            prefix_workspace=rows,
        )
        with running(engine), served(engine) as client:
            calls = [lambda c=client, p=prompt: c.complete(p)["choices"][0]["text"] for prompt in (LONG, LONG[::-1])]
            answers.append(client.together(calls))
            (pools,) = (s for s in engine.state.steps if s.name == "partition pools")
        assert ("a prefix workspace of 24 rows" in pools.note) == (rows == 24)
        assert bool(merged) == (rows == 24)
    assert answers[0] == answers[1]
