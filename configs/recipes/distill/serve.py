"""A translation service over HTTP: POST one sentence per line. serve.py FOLDER [PORT]; nmt-export has written FOLDER."""

import sys
from http.server import BaseHTTPRequestHandler, HTTPServer

import ctranslate2
import sentencepiece

PIECES = sentencepiece.SentencePieceProcessor(model_file=sys.argv[1] + "/sentencepiece.model")
MODEL = ctranslate2.Translator(sys.argv[1])
OPTIONS = {"beam_size": 5, "patience": 4, "length_penalty": 1, "disable_unk": True, "suppress_sequences": [["<pad>"], ["<s>"]]}


class Service(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        lines = self.rfile.read(int(self.headers["Content-Length"])).decode().removesuffix("\n").split("\n")
        found = MODEL.translate_batch(PIECES.encode(lines, out_type=str), **OPTIONS)
        self.send_response(200)
        self.end_headers()
        texts = (" ".join(PIECES.decode(result.hypotheses[0]).splitlines()) for result in found)  # always one line each
        self.wfile.write("".join(text + "\n" for text in texts).encode())


server = HTTPServer(("127.0.0.1", int(sys.argv[2]) if len(sys.argv) > 2 else 8000), Service)
print(f"http://127.0.0.1:{server.server_port} translates", flush=True)
server.serve_forever()
