"""The load generator counts every request once, from when it was due."""

import asyncio

from serve_load import Load, Outcome, generate


async def _answer(reader, writer, delay, count):
    try:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"POST /predict HTTP/1.1\r\n")
            await reader.readexactly(int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0]))
            count[0] += 1
            # Other connections count on while this one sleeps.
            number = count[0]
            await asyncio.sleep(delay)
            status = b"503 Full" if number % 4 == 0 else b"200 OK"
            writer.write(b"HTTP/1.1 " + status + b"\r\ncontent-length: 2\r\n\r\n{}")
    except asyncio.IncompleteReadError:
        writer.close()


def send(load, delay):
    async def run():
        count = [0]
        server = await asyncio.start_server(lambda r, w: _answer(r, w, delay, count), "127.0.0.1", 0)
        async with server:
            found = await generate(server.sockets[0].getsockname()[1], ["a", "b"], load)
            await asyncio.sleep(0.02)
        return found

    return asyncio.run(run())


def test_every_request_is_counted_and_refusals_are_failures():
    found = send(Load(rate=400, seconds=0.1, connections=4), 0)
    assert (len(found.seconds), found.failed) == (30, 10)


def test_time_in_the_queue_counts():
    # Five requests at once over one connection of 20 ms an answer: the last has waited for the four before it.
    found = send(Load(rate=5000, seconds=0.001, connections=1), 0.02)
    assert len(found.seconds) + found.failed == 5
    assert max(found.seconds) > 0.08


def test_quantiles_are_those_of_the_sorted_times():
    outcome = Outcome([float(n) for n in range(100, 0, -1)], 0, 1.0)
    assert [outcome.quantile(share) for share in (0.5, 0.95, 0.99, 1.0)] == [51.0, 96.0, 100.0, 100.0]
