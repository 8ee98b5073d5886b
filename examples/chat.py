"""A chat: append typed lines, tail the lines of all participants. `python examples/chat.py NAME [ADDRESS]`"""

import sys
import threading

import embarcadero as emb


def say(log: emb.Log, name: str) -> None:
    with log.publisher("chat", linger_ms=0) as publisher:  # closing waits until every line is in the log
        for line in sys.stdin:
            publisher.send(line.strip().encode(), key=name.encode())


def main(name: str = "me", address: str = "") -> None:
    with emb.connect(address) if address else emb.local(brokers=2) as log:
        if "chat" not in [topic.name for topic in log.topics()]:
            log.create_topic("chat", order=5)
        print(f"Hello {name}. Others join with: python examples/chat.py NAME {log.address}", flush=True)
        (typing := threading.Thread(target=say, args=(log, name), daemon=True)).start()
        seen, subscriber = 0, log.subscribe("chat", start="earliest", read="ordered")
        while typing.is_alive() or seen < log.tail("chat").seq:
            batch = subscriber.poll(timeout=0.5)
            for record in batch.records() if batch else []:
                seen = record.seq + 1
                print(f"{record.timestamp:%H:%M} {record.key.decode()}: {record.value.decode()}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
