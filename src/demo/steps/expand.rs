//! Expressions and command files, as far as the steps runner knows them.
//!
//! Known are plain look-ups: `secrets`, `vars`, `needs`, `github`, `env` and `steps`. Anything else is an error that names itself,
//! never a silent empty text.

use std::collections::BTreeMap;

use anyhow::{Context as _, bail};
use serde_json::Value;

/// What expressions look things up in: `{"secrets": …, "vars": …, "needs": …, "github": …, "env": …, "steps": …}`.
pub(super) struct Scope(pub(super) Value);

impl Scope {
    /// Replaces every `${{ a.b.c }}`.
    pub(super) fn expand(&self, text: &str) -> anyhow::Result<String> {
        let (mut rest, mut whole) = (text, String::new());
        while let Some((before, after)) = rest.split_once("${{") {
            let (expression, after) = after.split_once("}}").context("an expression begins with ${{ and has no }}")?;
            whole.push_str(before);
            whole.push_str(&self.look_up(expression.trim())?);
            rest = after;
        }
        whole.push_str(rest);
        Ok(whole)
    }

    /// A missing name below a known context is an empty text, as in Gitea.
    fn look_up(&self, path: &str) -> anyhow::Result<String> {
        let word = |part: &str| !part.is_empty() && part.chars().all(|c| c.is_alphanumeric() || "_-".contains(c));
        let mut at = &self.0;
        for (depth, part) in path.split('.').enumerate() {
            let known = depth > 0 || self.0.get(part).is_some();
            if !word(part) || !known {
                bail!("this runner of the demo does not know the expression ${{{{ {path} }}}}");
            }
            // Names of secrets and variables are upper-case at Gitea.
            at = at.get(part).or_else(|| at.get(part.to_uppercase())).unwrap_or(&Value::Null);
        }
        Ok(match at {
            Value::Null => String::new(),
            Value::String(text) => text.clone(),
            other => other.to_string(),
        })
    }

    /// Whether a step runs, from its `if:` and whether one before it failed.
    pub(super) fn runs(condition: Option<&str>, failed: bool) -> anyhow::Result<bool> {
        let bare = condition.unwrap_or("success()").trim();
        let bare = bare.strip_prefix("${{").and_then(|rest| rest.strip_suffix("}}")).unwrap_or(bare).trim();
        Ok(match bare {
            "success()" | "true" | "" => !failed,
            "always()" => true,
            "failure()" => failed,
            "false" => false,
            other => bail!("this runner of the demo does not know the condition {other:?}"),
        })
    }
}

/// Reads what a step left in its GITHUB_OUTPUT or GITHUB_ENV: lines `name=value`, or `name<<END` up to a line `END`.
pub(super) fn read_assignments(text: &str) -> anyhow::Result<BTreeMap<String, String>> {
    let (mut found, mut lines) = (BTreeMap::new(), text.lines());
    while let Some(line) = lines.next() {
        let (name, value) = match (line.split_once('='), line.split_once("<<")) {
            (Some((name, value)), None) => (name, value.to_owned()),
            (Some((name, value)), Some((other, _))) if name.len() < other.len() => (name, value.to_owned()),
            (_, Some((name, end))) => {
                let block: Vec<&str> = lines.by_ref().take_while(|line| *line != end).collect();
                (name, block.join("\n"))
            }
            (None, None) if line.is_empty() => continue,
            (None, None) => bail!("no name=value: {line:?}"),
        };
        found.insert(name.to_owned(), value);
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
    use serde_json::json;

    use super::*;

    #[test]
    fn known_names_are_looked_up_and_unknown_ones_named() {
        let scope = Scope(json!({"secrets": {"KEY": "k"}, "vars": {}, "needs": {"plan": {"outputs": {"a-b": "x"}}},
            "github": {"ref_protected": false}}));
        assert_eq!(
            scope.expand("a ${{ secrets.key }}-${{needs.plan.outputs.a-b}} ${{ github.ref_protected }}").unwrap(),
            "a k-x false"
        );
        assert_eq!(scope.expand("[${{ vars.NONE }}] $HOME").unwrap(), "[] $HOME");
        for wrong in
            ["${{ secrets.A", "${{ hashFiles('x') }}", "${{ matrix.os }}", "${{ }}", "${{ secrets. }}", "${{ vars['A'] }}"]
        {
            assert!(scope.expand(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn conditions_follow_what_happened_before() {
        for (condition, failed, runs) in [
            (None, false, true),
            (None, true, false),
            (Some("always()"), true, true),
            (Some("${{ always() }}"), true, true),
            (Some("failure()"), true, true),
            (Some("failure()"), false, false),
            (Some("false"), false, false),
        ] {
            assert_eq!(Scope::runs(condition, failed).unwrap(), runs, "{condition:?} {failed}");
        }
        assert!(Scope::runs(Some("github.ref == 'x'"), false).is_err());
    }

    #[test]
    fn assignments_are_lines_or_blocks() {
        let text = "a=1\nb<<END\ntwo\nlines=x\nEND\nc=x<<y\n\nd=";
        let read = read_assignments(text).unwrap();
        let pairs: Vec<_> = read.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
        assert_eq!(pairs, [("a", "1"), ("b", "two\nlines=x"), ("c", "x<<y"), ("d", "")]);
        assert!(read_assignments("nonsense").is_err());
    }
}
