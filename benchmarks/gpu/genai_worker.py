"""Speed of onnxruntime-genai on a folder that `edgeinfer export --for genai` wrote, as lines of JSON.

    PYTHON benchmarks/gpu/genai_worker.py FOLDER PROVIDER PROMPT STEPS SEQUENCES...

It runs in an environment of its own: the package needs a build of onnxruntime that must not be beside another. PROVIDER
is cpu or cuda. Each line has the number of sequences, the seconds of the prompt and the median seconds of a step.
"""

import json
import statistics
import sys
import time

import onnxruntime_genai as og


def main(folder: str, provider: str, prompt: int, steps: int, several: list[int]) -> None:
    """Measure prompts of equal ids and the steps after them."""
    config = og.Config(folder)
    config.clear_providers()
    if provider != "cpu":
        config.append_provider(provider)
    model = og.Model(config)
    for number, n in enumerate([several[0], *several]):  # the first warms up
        settings = og.GeneratorParams(model)
        settings.set_search_options(max_length=prompt + steps + 4, batch_size=n, do_sample=False)
        generator = og.Generator(model, settings)
        began = time.perf_counter()
        generator.append_tokens([[3 + i % 50 for i in range(prompt)]] * n if n > 1
                                else [3 + i % 50 for i in range(prompt)])
        read, times = time.perf_counter() - began, []
        while len(times) < steps and not generator.is_done():
            began = time.perf_counter()
            generator.generate_next_token()
            times.append(time.perf_counter() - began)
        if number:
            print(json.dumps({"sequences": n, "prompt_s": read, "step_s": statistics.median(times[1:]),
                              "version": og.__version__}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), [int(n) for n in sys.argv[5:]])
