#!/bin/bash
# Makes malmoi-bert and malmoi-gpt again, into src/malmoi/pair: text, corpus, vocabularies, training, 8 bits.
#   BILLS=FILE REVIEWS=FILE [JUDGED="FILE …"] [MINUTES=N] models/make.sh FOLDER
# BILLS: rationales of the National Assembly's bills (CC BY 4.0), a blank line between two;
# REVIEWS: NSMC's raw reviews (CC0), one a line; JUDGED: test sets whose text is left out.
set -euo pipefail
work=$1
here=$(dirname "$0")
malmoi() { python -m malmoi "$@"; }
judged=()
for file in ${JUDGED:-}; do judged+=(--decontaminate "$file"); done

python "$here/text.py" --clones "$work/clones" --out "$work/text" --bills "$BILLS" --reviews "$REVIEWS"
train="$work/text/train"
named() { for name in "$@"; do echo "$name=$train/$name.jsonl"; done; }
malmoi corpus build $(named books textbooks science dictionary factbook dialogues speeches) \
  -o "$work/corpus-en" --set min_words=20 ${judged[@]+"${judged[@]}"}
malmoi corpus build $(named korean remarks manuals bills) -o "$work/corpus-ko" --set min_words=8 \
  ${judged[@]+"${judged[@]}"}
# a review is one line: rules for pages do not fit it
malmoi corpus build $(named reviews) -o "$work/corpus-reviews" --set min_words=3 \
  --set max_ellipses=1 --set max_symbols=1 --set max_run=1,1,1 --set max_repeated_lines=1 \
  --set min_letters=0.4 --set min_word_length=1 ${judged[@]+"${judged[@]}"}
python "$here/pack.py" "$work"/corpus-en "$work"/corpus-ko "$work"/corpus-reviews --out "$work/corpus"

texts=()
for name in books prose speeches korean bills reviews; do texts+=("$work/corpus/$name.jsonl.bz2"); done
python "$here/vocabulary_text.py" "$work/corpus" "$work/vocabulary.jsonl"
malmoi tokenizer train "$work/vocabulary.jsonl" --kind wordpiece --lowercase --vocab 16000 -o "$work/tokenizer-bert"
malmoi tokenizer train "$work/vocabulary.jsonl" --kind byte-bpe --vocab 16000 -o "$work/tokenizer-gpt"
for model in bert gpt; do  # one after the other: beside the other, each is three times slower
  malmoi pretrain "$here/malmoi-$model/recipe.json" "${texts[@]}" -o "$work/malmoi-$model" \
    --tokenizer "$work/tokenizer-$model" ${MINUTES:+--minutes "$MINUTES"}
  cp "$here/malmoi-$model/README.md" "$work/malmoi-$model/"
  python "$here/store.py" "$work/malmoi-$model" "$here/../src/malmoi/pair/malmoi-$model"
done
