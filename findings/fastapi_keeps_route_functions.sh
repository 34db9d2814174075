#!/usr/bin/env bash
# fastapi 0.140.0 to 0.165.0: applications that nothing holds any more keep what their routes close over.
#
# How a route's function is to be called is looked up in caches of the whole process, of 4096 functions each. The
# caches hold the functions themselves, and so the closures of applications that were thrown away: a server that
# makes an application anew for each model, role or tenant keeps the models of the last ones, until others push them
# out. fastapi 0.139.0 keeps nothing.
#
# Seen on 2026-11-28 with Python 3.11:
#     0.139.0 kept 0 of 5
#     0.165.0 kept 5 of 5
#
# Ends with 0 while that is so, with 1 when it has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
cat > run.py <<'PY'
import gc
import weakref

import fastapi


class Model:
    """Stands for what an application serves."""


def application(model: Model) -> fastapi.FastAPI:
    app = fastapi.FastAPI()

    @app.get("/")
    async def root() -> str:
        return str(model)

    return app


models = []
for _ in range(5):
    model = Model()
    models.append(weakref.ref(model))
    app = application(model)
    del app, model
gc.collect()
print(fastapi.__version__, "kept", sum(model() is not None for model in models), "of 5")
PY
python3 -m venv environment
for version in 0.139.0 0.165.0; do
  environment/bin/python -m pip --quiet --disable-pip-version-check install "fastapi==$version"
  environment/bin/python run.py | tee -a output
done
diff output - << 'TEXT'
0.139.0 kept 0 of 5
0.165.0 kept 5 of 5
TEXT
