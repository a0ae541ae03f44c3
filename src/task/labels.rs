//! Which backend `runs-on` names, or what to write instead.
//!
//! Gitea gives a job only to a runner that has declared each of its labels, spelled exactly so, and a job without labels to every
//! runner (`gitea.md` §3.5). So odd labels come here from jobs without any, or after this runner's labels were changed.

use crate::ids::BackendKind;

/// The backend that `runs-on` names, or why none: it must contain `self-hosted` and exactly one of `pod` and `vm_label`.
pub fn backend_of(labels: &[String], vm_label: &str) -> Result<BackendKind, String> {
    let has = |wanted: &str| labels.iter().any(|label| label == wanted);
    match (has("self-hosted"), has("pod"), has(vm_label)) {
        (true, true, false) => Ok(BackendKind::Pod),
        (true, false, true) => Ok(BackendKind::Vm),
        (_, true, true) => Err(format!("`runs-on` names both `pod` and `{vm_label}`. Keep one of them: {}", advice(vm_label))),
        _ => Err(format!("{} {}", complaint(labels, vm_label), advice(vm_label))),
    }
}

fn advice(vm_label: &str) -> String {
    format!("Write `runs-on: [self-hosted, pod]` or `runs-on: [self-hosted, {vm_label}]`.")
}

fn complaint(labels: &[String], vm_label: &str) -> String {
    if labels.is_empty() {
        return "The job has no `runs-on`.".into();
    }
    if labels.iter().any(|label| label.trim().is_empty()) {
        return "A label of `runs-on` is empty. Gitea evaluates `runs-on` without `needs` and `secrets`, so `${{ needs.x.outputs.y }}` and \
                an unset variable become the empty text; use `vars`, `inputs` or `matrix`."
            .into();
    }
    if labels.iter().any(|label| label == "Array") {
        return "The label `Array` is what Gitea makes of an expression that gives a list, such as `${{ fromJSON(…) }}`: it cannot give \
                more than one label. Write a list with one expression for each label."
            .into();
    }
    let shown = shown(labels);
    if labels.iter().any(|label| label.contains("${{")) {
        return format!("`runs-on` is {shown}: Gitea left an expression in it unevaluated.");
    }
    if labels.iter().any(|label| label.trim_start().starts_with('[')) {
        return format!("`runs-on` is {shown}: that is one label that looks like a list. Write a YAML list without quotes.");
    }
    let spelled = |wanted: &str| labels.iter().find(|label| *label != wanted && label.trim().eq_ignore_ascii_case(wanted));
    if let Some(label) = ["self-hosted", "pod", vm_label].into_iter().find_map(spelled) {
        return format!(
            "`runs-on` is {shown}: labels are compared letter by letter, and {label:?} is not the one that is meant."
        );
    }
    if !labels.iter().any(|label| label == "self-hosted") {
        return format!("`runs-on` is {shown}, without `self-hosted`.");
    }
    format!("`runs-on` is {shown}, with neither `pod` nor `{vm_label}`.")
}

/// The first few labels for a log row, quoted, so that control characters do not reach it.
fn shown(labels: &[String]) -> String {
    let mut parts: Vec<String> = labels.iter().take(8).map(|label| format!("{:?}", super::cut(label, 60))).collect();
    if labels.len() > 8 {
        parts.push("…".into());
    }
    format!("[{}]", parts.join(", "))
}
