"""Target, raw sources, prepared rows.

Inputs: the config. Outputs: results/<run>/{target,raw,prepared}/.
"""


rule target:
    """The target LLM in HF layout, bf16, with its tokenizer and chat template."""
    output:
        manifest=update("results/{run}/target/manifest.json"),
    log:
        "results/{run}/logs/target.log",
    benchmark:
        "results/{run}/logs/target.benchmark.jsonl"
    priority: 1  # before any answer: a large dataset that is prepared late would be answered alone at the end
    conda:
        "../envs/aerie.yaml"
    params:
        **code("scripts/target.py"),
        settings=settings("target"),
    shell:
        r"""
        python -m scripts.target \
            --output {output.manifest:q} \
            --settings {params.settings:q} \
            2>&1 | tee {log:q}
        """


rule fetch:
    """The pinned raw bytes of one dataset or benchmark task."""
    output:
        manifest=update("results/{run}/raw/{source}/manifest.json"),
    log:
        "results/{run}/logs/fetch/{source}.log",
    benchmark:
        "results/{run}/logs/fetch/{source}.benchmark.jsonl"
    priority: 1  # before any answer: a large dataset that is prepared late would be answered alone at the end
    retries: 1
    conda:
        "../envs/aerie.yaml"
    params:
        **code("scripts/fetch.py"),
        settings=fetch_settings,
    shell:
        r"""
        python -m scripts.fetch \
            --output {output.manifest:q} \
            --settings {params.settings:q} \
            2>&1 | tee {log:q}
        """


rule prepare:
    """Raw records of one source as rows in one schema, with every rejection counted."""
    input:
        raw="results/{run}/raw/{source}/manifest.json",
        target="results/{run}/target/manifest.json",
    output:
        manifest=update("results/{run}/prepared/{source}/manifest.json"),
        rows=update("results/{run}/prepared/{source}/rows-00000.parquet"),
    log:
        "results/{run}/logs/prepare/{source}.log",
    benchmark:
        "results/{run}/logs/prepare/{source}.benchmark.jsonl"
    priority: 1  # before any answer: a large dataset that is prepared late would be answered alone at the end
    conda:
        "../envs/aerie.yaml"
    params:
        **code("scripts/prepare.py"),
        settings=prepare_settings,
    shell:
        r"""
        python -m scripts.prepare \
            --raw {input.raw:q} \
            --target {input.target:q} \
            --output {output.manifest:q} \
            --settings {params.settings:q} \
            2>&1 | tee {log:q}
        """
