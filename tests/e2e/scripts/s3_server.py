"""An S3 server (moto's) on a free port of the loopback, which it prints: python s3_server.py HELD.

If the file HELD.wanted is there, the next write of an index with its content is not answered: HELD is made instead.
"""

import io
import sys
import time
from pathlib import Path

from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

held = Path(sys.argv[1])
wanted = held.with_name(f"{held.name}.wanted")
s3 = DomainDispatcherApplication(create_backend_app)


def application(environ, start_response):
    if environ["REQUEST_METHOD"] == "PUT" and environ["PATH_INFO"].endswith("/checkpoints.json") and wanted.exists():
        body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        if wanted.read_bytes() in body:
            held.touch()
            while wanted.exists():
                time.sleep(0.05)
            start_response("503 Slow Down", [])
            return []
        environ["wsgi.input"] = io.BytesIO(body)
    return s3(environ, start_response)


server = make_server("127.0.0.1", 0, application, threaded=True)
print(server.server_port, flush=True)
server.serve_forever()
