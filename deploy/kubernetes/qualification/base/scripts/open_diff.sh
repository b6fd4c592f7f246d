#!/bin/sh
# clone: fetch the repository of the reviewed matrices. push: make new evidence, where there is some, a branch for review.
#   REPOSITORY  where the reviewed matrices are        MATRICES  their folder in it
# GitLab opens the merge request by itself (push options); elsewhere the branch waits for its pull request.
set -eu
work=${WORK:-/work}
case $1 in
  clone)
    git clone --quiet --depth 1 "$REPOSITORY" "$work/repository"
    ;;
  push)
    cd "$work/repository"
    [ -d "$work/out/matrices" ] || { echo "no new evidence"; exit 0; }
    cp -R "$work/out/matrices/." "$MATRICES/"
    git add "$MATRICES"
    if git diff --cached --quiet; then echo "the new evidence is what was there"; exit 0; fi
    # One branch for one outcome, however many nodes and nights come to it.
    branch=qualification/$(git diff --cached | git hash-object --stdin | cut -c1-12)
    if git ls-remote --exit-code --heads origin "$branch" >/dev/null; then echo "$branch is open already"; exit 0; fi
    { echo "matrices: evidence of a machine that has changed"; echo; cat "$work/out/diff.txt"; } |
      git -c user.name=hallmark -c user.email=hallmark@localhost commit --quiet --file -
    git push --quiet -o merge_request.create -o merge_request.remove_source_branch origin "HEAD:refs/heads/$branch" ||
      git push --quiet origin "HEAD:refs/heads/$branch" # a server that takes no push options
    echo "opened $branch"
    ;;
esac
