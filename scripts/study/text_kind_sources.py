"""List the files and packages from which each held-out kind of text is read."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from scripts.study import text_kind_readers as read
from scripts.study.packages import Package
from scripts.study.text_kind_readers import Document


@dataclass(frozen=True)
class Part:
    package: Package
    pattern: str
    """Pattern of files in the package, as in Path.glob."""
    take: int
    """Number of documents, evenly spaced over all that the reader returns."""
    read: Callable[[Path], list[Document]] = read.plain


def pip(name: str, version: str, licence: str) -> Package:
    return Package("pip", name, version, licence)


def npm(name: str, version: str, licence: str) -> Package:
    return Package("npm", name, version, licence)


def apt(name: str, version: str, licence: str) -> Package:
    return Package("apt", name, version, licence)


GENSIM = pip(
    "gensim", "4.3.3", "LGPL-2.1-only; the texts: Australian Broadcasting Corporation, Wikipedia (CC-BY-SA-3.0)"
)
LM_EVAL = pip("lm_eval", "0.4.13", "MIT")
NETWORKX = pip("networkx", "3.4.2", "BSD-3-Clause")
STATSMODELS = pip("statsmodels", "0.14.6", "BSD-3-Clause")
SCIPY = pip("scipy", "1.16.3", "BSD-3-Clause")
SKLEARN = pip("scikit-learn", "1.6.1", "BSD-3-Clause")
DJANGO = pip("django", "5.2", "BSD-3-Clause")
ANSIBLE = pip("ansible-core", "2.18.5", "GPL-3.0-or-later")
BOTOCORE = pip("botocore", "1.38.0", "Apache-2.0")
NLTK = pip("nltk", "3.10.4", "Apache-2.0")
MUSIC21 = pip("music21", "10.5.1", "BSD-3-Clause")
HANDBOOK = apt("debian-handbook", "11.20220922", "CC-BY-SA-3.0 or GPL-2.0-or-later")
R_MANUALS = apt("r-doc-html", "4.2.2.20221110-2", "GPL-2.0-or-later")
OCTAVE = apt("octave-doc", "7.3.0-2", "GPL-3.0-or-later")
SQLALCHEMY_MANUAL = apt("python-sqlalchemy-doc", "1.4.46+ds1-1", "MIT")
GIMP = {
    language: apt(f"gimp-help-{language}", "2.10.34-2", "GFDL-1.2-or-later")
    for language in ("en", "fr", "de", "ru", "zh-cn")
}
INSTALLATION = apt("installation-guide-amd64", "20230508+deb12u1", "GPL-2.0-or-later")
REFERENCE = {
    language: apt(f"debian-reference-{language}", "2.100", "GPL-2.0-or-later")
    for language in ("en", "fr", "de", "zh-cn")
}
DEVELOPERS = {
    suffix: apt(f"developers-reference{suffix}", "12.18", "GPL-2.0-or-later") for suffix in ("", "-fr", "-de", "-ru")
}
TOKIO = apt("librust-tokio-dev", "1.24.2-1", "MIT")
CLAP = apt("librust-clap-3-dev", "3.2.23-4+b1", "MIT or Apache-2.0")
RE2 = npm("re2", "1.24.0", "BSD-3-Clause; abseil-cpp: Apache-2.0")
LEVELDOWN = npm("leveldown", "6.1.1", "MIT; leveldb and snappy: BSD-3-Clause")
FASTIFY = npm("fastify", "5.2.1", "MIT")
ESLINT = npm("eslint", "10.15.0", "MIT")
WEBPACK = npm("webpack", "5.112.2", "MIT")
ZOD = npm("zod", "4.6.7", "MIT")
KNEX = npm("knex", "3.3.0", "MIT")
VEGA = npm("vega-datasets", "3.2.1", "BSD-3-Clause")
HANDBOOK_PAGES = "usr/share/doc/debian-handbook/html/{}/sect.*.html"

PARTS: dict[str, list[Part]] = {
    "news": [Part(GENSIM, "gensim/test/test_data/lee_background.cor", 12, read.news)],
    "wiki": [Part(GENSIM, "gensim/test/test_data/enwiki-latest*-shortened.bz2", 14, read.wiki)],
    "technical": [
        Part(HANDBOOK, HANDBOOK_PAGES.format("en-US"), 3, read.prose),
        Part(SQLALCHEMY_MANUAL, "usr/share/doc/python-sqlalchemy-doc/html/*/*.html", 3, read.prose),
        Part(OCTAVE, "usr/share/doc/octave/octave.html/*.html", 3, read.prose),
        Part(GIMP["en"], "usr/share/gimp/2.0/help/en/*.html", 3, read.prose),
        Part(R_MANUALS, "usr/share/R/doc/manual/R-*.html", 2, read.prose),
        Part(DEVELOPERS[""], "usr/share/**/*.html", 2, read.prose),
    ],
    "chat": [
        Part(pip("chitchat-dataset", "0.9.0", "MIT"), "chitchat_dataset/dataset.json", 14, read.chitchat),
        Part(pip("chatterbot-corpus", "1.3.3", "BSD-3-Clause"), "**/data/english/*.yml", 6, read.small_talk),
        Part(LM_EVAL, "**/mmlu/flan_cot_fewshot/_cot_prompts.json", 8, read.reasoning),
        Part(apt("debian-faq", "11.1", "GPL-2.0-or-later"), "usr/share/doc/debian/FAQ/*.en.html", 8, read.faq),
        Part(R_MANUALS, "usr/share/R/doc/manual/R-FAQ.html", 8, read.faq),
        Part(NETWORKX, "networkx/algorithms/**/[a-z]*.py", 4, read.functions),
        Part(NLTK, "nltk/**/[a-z]*.py", 3, read.functions),
        Part(STATSMODELS, "statsmodels/**/[a-z]*.py", 3, read.functions),
        Part(MUSIC21, "music21/**/[a-z]*.py", 3, read.functions),
    ],
    "python": [
        Part(package, pattern, 1, read.code)
        for package, pattern in (
            (DJANGO, "django/db/**/*.py"),
            (pip("sqlalchemy", "2.0.40", "MIT"), "sqlalchemy/orm/*.py"),
            (pip("requests", "2.34.2", "Apache-2.0"), "requests/*.py"),
            (pip("rich", "14.0.0", "MIT"), "rich/*.py"),
            (NETWORKX, "networkx/algorithms/**/[a-z]*.py"),
            (SKLEARN, "sklearn/*/_[a-z]*.py"),
            (pip("twisted", "26.10.0", "MIT"), "twisted/protocols/*.py"),
            (pip("pandas", "2.2.3", "BSD-3-Clause"), "pandas/core/**/*.py"),
            (NLTK, "nltk/**/*.py"),
            (pip("tornado", "6.6.1", "Apache-2.0"), "tornado/*.py"),
            (MUSIC21, "music21/analysis/*.py"),
            (pip("sympy", "1.14.0", "BSD-3-Clause"), "sympy/**/[a-z]*.py"),
            (ANSIBLE, "ansible/modules/*.py"),
            (BOTOCORE, "botocore/*.py"),
        )
    ],
    "c": [
        Part(package, pattern, take, read.code)
        for package, pattern, take in (
            (RE2, "package/vendor/abseil-cpp/absl/**/*.cc", 2),
            (RE2, "package/vendor/re2/re2/*.cc", 1),
            (LEVELDOWN, "package/deps/leveldb/**/*.cc", 1),
            (LEVELDOWN, "package/deps/snappy/**/*.cc", 1),
            (npm("libxmljs", "1.0.11", "MIT; libxml2: MIT"), "package/vendor/libxml2/*.c", 3),
            (npm("node-expat", "2.4.1", "MIT"), "package/deps/libexpat/**/*.c", 2),
            (npm("lmdb", "3.5.6", "MIT; lmdb: OLDAP-2.8"), "package/dependencies/lmdb/**/*.c", 1),
            (npm("tree-sitter", "0.25.1", "MIT"), "package/vendor/tree-sitter/**/*.c", 1),
            (npm("better-sqlite3", "12.11.1", "MIT"), "package/src/**/*.cpp", 1),
            (npm("argon2", "0.45.1", "MIT; argon2: CC0-1.0 or Apache-2.0"), "package/argon2/src/*.c", 1),
            (npm("sharp", "0.35.5", "Apache-2.0"), "package/src/*.cc", 1),
        )
    ],
    "web": [
        Part(package, pattern, take, read.code)
        for package, pattern, take in (
            (ZOD, "package/src/v4/core/*.ts", 1),
            (npm("effect", "4.1.0", "MIT"), "package/src/*.ts", 1),
            (npm("rxjs", "7.8.2", "Apache-2.0"), "package/src/internal/**/*.ts", 2),
            (npm("redux", "5.0.1", "MIT"), "package/src/*.ts", 1),
            (npm("preact", "11.2.0", "MIT"), "package/src/**/*.js", 1),
            (npm("svelte", "5.57.3", "MIT"), "package/src/**/*.js", 2),
            (npm("three", "0.187.0", "MIT"), "package/src/**/*.js", 2),
            (ESLINT, "package/lib/rules/*.js", 1),
            (WEBPACK, "package/lib/**/*.js", 1),
            (npm("mongoose", "9.12.1", "MIT"), "package/lib/**/*.js", 1),
            (KNEX, "package/lib/**/*.js", 1),
            (npm("jquery", "4.0.0", "MIT"), "package/src/**/*.js", 1),
        )
    ],
    "java-go-rust": [
        Part(package, pattern, take, read.code)
        for package, pattern, take in (
            (npm("react-native", "0.76.0", "MIT"), "package/**/*.java", 3),
            (npm("cordova-android", "15.1.0", "Apache-2.0"), "package/**/*.java", 2),
            (apt("golang-golang-x-tools-dev", "1:0.5.0+ds-1", "BSD-3-Clause"), "usr/share/gocode/**/*.go", 2),
            (apt("golang-github-gin-gonic-gin-dev", "1.8.1-1", "MIT"), "usr/share/gocode/**/*.go", 1),
            (apt("golang-google-grpc-dev", "1.33.3-2", "Apache-2.0"), "usr/share/gocode/**/*.go", 1),
            (apt("golang-github-spf13-cobra-dev", "1.6.1-1", "Apache-2.0"), "usr/share/gocode/**/*.go", 1),
            (TOKIO, "usr/share/cargo/registry/*/src/**/*.rs", 1),
            (CLAP, "usr/share/cargo/registry/*/src/**/*.rs", 1),
            (apt("librust-rayon-dev", "1.6.1-1", "MIT or Apache-2.0"), "usr/share/cargo/registry/*/src/**/*.rs", 1),
            (apt("librust-regex-dev", "1.7.1-1", "MIT or Apache-2.0"), "usr/share/cargo/registry/*/src/**/*.rs", 1),
            (apt("librust-syn-dev", "1.0.107-1", "MIT or Apache-2.0"), "usr/share/cargo/registry/*/src/**/*.rs", 1),
        )
    ],
    "json": [
        Part(VEGA, "package/data/[fl]*.json", 1),
        Part(VEGA, "package/data/*.json", 3, read.data),
        Part(npm("world-countries", "5.1.0", "ODbL-1.0"), "package/countries.json", 1),
        Part(npm("mime-db", "1.54.0", "MIT"), "package/db.json", 1),
        Part(npm("cldr-dates-full", "48.2.0", "Unicode-3.0"), "package/main/*/*.json", 2),
        Part(BOTOCORE, "botocore/data/*/*/*.json", 2),
        Part(ESLINT, "package/package.json", 1),
        Part(WEBPACK, "package/schemas/*.json", 1),
        Part(ANSIBLE, "ansible/**/*.yml", 2),
        Part(LM_EVAL, "lm_eval/tasks/**/*.yaml", 3),
        Part(TOKIO, "usr/share/cargo/registry/*/Cargo.toml", 1),
        Part(CLAP, "usr/share/cargo/registry/*/Cargo.toml", 1),
    ],
    "html-markdown": [
        Part(FASTIFY, "package/docs/*/*.md", 2),
        Part(npm("pino", "9.6.0", "MIT"), "package/docs/*.md", 2),
        Part(npm("ava", "6.2.0", "MIT"), "package/*.md", 1),
        Part(npm("execa", "9.6.1", "MIT"), "package/*.md", 1),
        Part(ZOD, "package/*.md", 1),
        Part(npm("yargs", "18.2.0", "MIT"), "package/*.md", 1),
        Part(LM_EVAL, "lm_eval/tasks/**/README.md", 2),
        Part(OCTAVE, "usr/share/doc/octave/octave.html/*.html", 2, read.page),
        Part(GIMP["en"], "usr/share/gimp/2.0/help/en/*.html", 2, read.page),
        Part(HANDBOOK, HANDBOOK_PAGES.format("en-US"), 1, read.page),
        Part(DJANGO, "django/**/*.html", 2),
    ],
    "math": [
        Part(pip("mpmath", "1.3.0", "BSD-3-Clause"), "mpmath/**/*.py", 5, read.formulas),
        Part(SCIPY, "scipy/**/[_a-z]*.py", 6, read.formulas),
        Part(STATSMODELS, "statsmodels/**/*.py", 6, read.formulas),
        Part(pip("pennylane", "0.45.1", "Apache-2.0"), "pennylane/**/*.py", 6, read.formulas),
        Part(NETWORKX, "networkx/**/*.py", 3, read.formulas),
        Part(LM_EVAL, "lm_eval/tasks/gsm8k/gsm8k-cot.yaml", 1, read.word_problems),
        Part(LM_EVAL, "lm_eval/tasks/minerva_math/utils.py", 1, read.solved),
    ],
    "french": [
        Part(HANDBOOK, HANDBOOK_PAGES.format("fr-FR"), 4, read.translated),
        Part(REFERENCE["fr"], "usr/share/**/*.fr.html", 2, read.translated),
        Part(DEVELOPERS["-fr"], "usr/share/**/*.html", 2, read.translated),
        Part(INSTALLATION, "usr/share/doc/installation-guide-amd64/fr/*.html", 3, read.translated),
        Part(GIMP["fr"], "usr/share/gimp/2.0/help/fr/*.html", 3, read.translated),
    ],
    "german": [
        Part(HANDBOOK, HANDBOOK_PAGES.format("de-DE"), 4, read.translated),
        Part(REFERENCE["de"], "usr/share/**/*.de.html", 2, read.translated),
        Part(DEVELOPERS["-de"], "usr/share/**/*.html", 2, read.translated),
        Part(INSTALLATION, "usr/share/doc/installation-guide-amd64/de/*.html", 3, read.translated),
        Part(GIMP["de"], "usr/share/gimp/2.0/help/de/*.html", 3, read.translated),
    ],
    "russian": [
        Part(HANDBOOK, HANDBOOK_PAGES.format("ru-RU"), 7, read.translated),
        Part(DEVELOPERS["-ru"], "usr/share/**/*.html", 3, read.translated),
        Part(INSTALLATION, "usr/share/doc/installation-guide-amd64/ru/*.html", 6, read.translated),
        Part(GIMP["ru"], "usr/share/gimp/2.0/help/ru/*.html", 6, read.translated),
    ],
    "chinese": [
        Part(HANDBOOK, HANDBOOK_PAGES.format("zh-CN"), 3, read.translated),
        Part(REFERENCE["zh-cn"], "usr/share/**/ch*.zh-cn.html", 7, read.translated),
        Part(INSTALLATION, "usr/share/doc/installation-guide-amd64/zh_CN/ch*.html", 6, read.translated),
        Part(GIMP["zh-cn"], "usr/share/gimp/2.0/help/zh_CN/gimp-introduction-history-2*.html", 2, read.translated),
        Part(npm("egg", "3.17.5", "MIT"), "package/README.zh-CN.md", 1),
    ],
}
