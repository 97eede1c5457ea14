import os,random,sys
from tests.test_server import *
import pytest
@pytest.mark.parametrize("n", range(12))
def test_it(serve, n, runtime_dir):
    daemon = serve("--data", RAGGED)
    path = control_path(str(daemon.socket))
    rng = random.Random(0)
    whole = encode(Lookup("ragged_uint16", bytes(8)), 7)
    with dealer(path) as client:
        for i in range(500):
            frame = rng.randbytes(rng.randrange(200)) if rng.random() < 0.5 else whole[: rng.randrange(len(whole))]
            client.send(frame)
            if not client.poll(4000):
                out=os.popen(f"cat /proc/{daemon.pid}/task/*/wchan; ls -l /proc/{daemon.pid}/fd").read()
                client.send(b"xx"); 
                pytest.fail(f"at {i} {frame!r} then {client.poll(2000)} {out}")
            client.recv()
