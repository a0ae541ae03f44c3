//! Gitea: whether it is there, new enough, in time with us, knows the runner and its labels, and believes in an address that jobs reach.
//!
//! Nothing is fetched or declared. Whether the token is right is asked by UpdateTask for a task that cannot exist: Gitea checks the
//! token first, changes nothing, and shows the runner as online for a minute, as after any of its calls (docs/decisions/0024).

use std::{
    sync::Arc,
    time::{Duration, SystemTime},
};

use http::{StatusCode, Uri};
use serde::Deserialize;

use super::{Item, World, child};
use crate::{
    backend::local::Isolation,
    config::{CREDENTIALS_FILE, StoredCredentials},
    gitea::{
        RpcFault, RunnerRpc,
        look::{Answer, Web},
        report,
    },
    ids::TaskId,
};

/// Older ones lack calls that this program makes.
const OLDEST: (u32, u32) = (1, 26);
/// The newest that this version is tested with.
const TESTED: (u32, u32) = (1, 27);
/// More than this breaks tokens, certificates and the ages that people are shown.
const CLOCK_LIMIT_MS: i64 = 2000;
const CLOCK_SAMPLES: u32 = 3;
/// `Date` counts whole seconds, so several questions at other parts of a second narrow it.
const CLOCK_PAUSE: Duration = Duration::from_millis(350);
const RPC_LIMIT: Duration = Duration::from_secs(15);

pub(super) async fn probe(world: &Arc<World>) -> Vec<Item> {
    if !world.has_url() {
        return vec![Item::unknown("gitea", "GITEA_URL names no address to ask", "set GITEA_URL to Gitea's ROOT_URL")];
    }
    let gitea = &world.config.gitea;
    let web = match Web::towards(&world.config.proxies(), &gitea.url, gitea.ca_file.as_deref()) {
        Ok(web) => web,
        Err(e) => return vec![Item::todo("gitea", e.0, "correct GITEA_URL or GITEA_CA_FILE")],
    };
    let answer = match web.get(&format!("{}/api/v1/version", gitea.url), None).await {
        Ok(answer) => answer,
        Err(why) => return vec![unreachable(world, "gitea", &gitea.url, &why)],
    };
    if let Some(item) = misdirected(&web, &gitea.url, &answer).await {
        return vec![item];
    }
    let mut items = vec![Item::fine("gitea", format!("{} answers", gitea.url)), version(&answer)];
    let (clock, token, labels, root) =
        tokio::join!(clock(&web, &gitea.url, answer), token(world), labels(world, &web), root_url(world, &web));
    items.extend([clock, token, labels]);
    items.extend(root);
    items
}

/// Why there is no answer, by the words of who found it.
fn unreachable(world: &World, name: &'static str, url: &str, why: &str) -> Item {
    let proxied = if world.config.local.proxy.is_empty() { "" } else { " (a proxy is set; NO_PROXY leaves a host out)" };
    let host = url.parse::<Uri>().ok().and_then(|uri| uri.host().map(str::to_owned)).unwrap_or_default();
    let is = |words: &[&str]| words.iter().any(|word| why.contains(word));
    let to_do = if is(&["UnknownIssuer", "CaUsedAsEndEntity"]) {
        "the certificate is from an authority that is not trusted here: set GITEA_CA_FILE to that authority's certificate (PEM)"
            .into()
    } else if is(&["NotValidForName"]) {
        "the certificate is for another name: address Gitea as its certificate does, or give it one for this name".into()
    } else if is(&["certificate expired", "Expired", "NotValidYet"]) {
        "the certificate's time is over or not begun: renew it, and look at this machine's clock".into()
    } else if is(&["InvalidContentType"]) {
        "what answers there does not speak TLS: write http://, or the port that speaks TLS".into()
    } else if is(&["dns error", "lookup"]) {
        format!("the name {host} cannot be looked up: correct it, or this machine's DNS (/etc/resolv.conf, /etc/hosts){proxied}")
    } else if is(&["tunnel error", "proxy"]) {
        "the proxy does not let us through: look at HTTPS_PROXY and HTTP_PROXY, or leave Gitea out by NO_PROXY".into()
    } else if is(&["refused"]) {
        format!("nothing listens there: start Gitea, or correct address and port{proxied}")
    } else {
        format!("look whether this machine can reach it (`curl -v {url}`), at firewalls between{proxied}")
    };
    Item::todo(name, format!("{url} does not answer: {why}"), to_do)
}

/// Something answers, but it is not Gitea's API.
async fn misdirected(web: &Web, url: &str, answer: &Answer) -> Option<Item> {
    let said = |what: &str| format!("{url} answers {}{what}", answer.status.as_u16());
    let status = answer.status;
    if status == StatusCode::PROXY_AUTHENTICATION_REQUIRED {
        let to_do = "the proxy wants a user: write it into HTTPS_PROXY or HTTP_PROXY (http://user:password@proxy:port), or leave Gitea out by NO_PROXY";
        return Some(Item::todo("gitea", said(": the proxy wants to know who we are"), to_do));
    }
    if status.is_redirection() {
        let to = answer.location.as_deref().unwrap_or("elsewhere");
        let to = to.strip_suffix("/api/v1/version").unwrap_or(to);
        return Some(Item::todo(
            "gitea",
            said(&format!(", which leads to {to}")),
            "set GITEA_URL to where it leads; redirects are not followed",
        ));
    }
    if matches!(status.as_u16(), 502..=504) {
        let to_do = "a proxy answers in Gitea's place: start Gitea, or look at the proxy in front of it";
        return Some(Item::todo("gitea", said(""), to_do));
    }
    // With REQUIRE_SIGNIN_VIEW the version is for who is known; the runner protocol is open all the same.
    if matches!(status.as_u16(), 401 | 403) || says_version(answer).is_some() {
        return None;
    }
    let origin = url.parse::<Uri>().ok().and_then(|uri| Some(format!("{}://{}", uri.scheme_str()?, uri.authority()?)))?;
    if origin != url
        && let Ok(there) = web.get(&format!("{origin}/api/v1/version"), None).await
        && says_version(&there).is_some()
    {
        return Some(Item::todo("gitea", said(&format!(", but Gitea answers at {origin}")), format!("set GITEA_URL={origin}")));
    }
    let to_do = "set GITEA_URL to Gitea's ROOT_URL, with its sub-path if it has one (https://example.org/git)";
    Some(Item::todo("gitea", said(", and that is not Gitea's API"), to_do))
}

#[derive(Deserialize)]
struct Version {
    version: String,
}

fn says_version(answer: &Answer) -> Option<String> {
    let said: Version = serde_json::from_slice(&answer.body).ok()?;
    answer.status.is_success().then(|| said.version.chars().filter(|c| !c.is_control()).take(60).collect())
}

/// `1.27.3+dev-12-gabc` → (1, 27).
fn number(version: &str) -> Option<(u32, u32)> {
    let mut parts = version.trim_start_matches('v').split(['.', '-', '+']).map(str::parse);
    match (parts.next(), parts.next()) {
        (Some(Ok(major)), Some(Ok(minor))) => Some((major, minor)),
        _ => None,
    }
}

fn version(answer: &Answer) -> Item {
    let name = "gitea.version";
    let Some(said) = says_version(answer) else {
        return Item::unknown(
            name,
            "Gitea tells its version only to who is signed in",
            "look at the foot of any of its pages: 1.26 or newer is needed",
        );
    };
    match number(&said) {
        Some(found) if found < OLDEST => {
            Item::todo(name, format!("Gitea is {said}; 1.{} or newer is needed", OLDEST.1), "upgrade Gitea")
        }
        Some(found) if found > TESTED => {
            let to_do = format!(
                "if jobs behave oddly, look for a newer gitea-dynamic-runner: this one is tested with Gitea up to 1.{}",
                TESTED.1
            );
            Item::note(name, format!("Gitea is {said}, newer than what this version is tested with"), to_do)
        }
        Some(_) => Item::fine(name, format!("Gitea {said}")),
        None => Item::unknown(name, format!("Gitea calls its version {said:?}"), "make sure that it is 1.26 or newer"),
    }
}

fn ms(at: SystemTime) -> i64 {
    at.duration_since(SystemTime::UNIX_EPOCH).map_or(0, |since| i64::try_from(since.as_millis()).unwrap_or(i64::MAX))
}

/// How far Gitea's clock is ahead of ours, in ms: at least and at most. `Date` leaves out the part of a second, and the answer was
/// made at some time between question and answer.
fn ahead(samples: &[(i64, i64, i64)]) -> (i64, i64) {
    let least = samples.iter().map(|(_, date, answered)| date - answered).max().unwrap_or(i64::MIN);
    let most = samples.iter().map(|(asked, date, _)| date + 1000 - asked).min().unwrap_or(i64::MAX);
    (least, most)
}

fn sample(answer: &Answer) -> Option<(i64, i64, i64)> {
    let date = httpdate::parse_http_date(answer.date.as_deref()?).ok()?;
    Some((ms(answer.asked), ms(date), ms(answer.answered)))
}

async fn clock(web: &Web, url: &str, first: Answer) -> Item {
    let mut samples: Vec<_> = sample(&first).into_iter().collect();
    for _ in 1..CLOCK_SAMPLES {
        tokio::time::sleep(CLOCK_PAUSE).await;
        samples.extend(web.get(&format!("{url}/api/v1/version"), None).await.ok().as_ref().and_then(sample));
    }
    if samples.is_empty() {
        let to_do = "compare `date -u` here and on Gitea's machine; more than two seconds is too much";
        return Item::unknown("gitea.clock", "Gitea's answers have no Date", to_do);
    }
    judge_clock(ahead(&samples))
}

fn judge_clock((least, most): (i64, i64)) -> Item {
    let off = if least > CLOCK_LIMIT_MS { least } else { most };
    if least > CLOCK_LIMIT_MS || most < -CLOCK_LIMIT_MS {
        let whose = if off > 0 { "behind" } else { "ahead of" };
        let said = format!("this machine's clock is {:.1} s {whose} Gitea's", off.unsigned_abs() as f64 / 1000.0);
        let to_do = "let both keep time from the network (systemd-timesyncd or chrony; `timedatectl` shows it), then restart the controller";
        return Item::todo("gitea.clock", said, to_do);
    }
    Item::fine("gitea.clock", "this machine's clock and Gitea's are less than two seconds apart")
}

async fn token(world: &World) -> Item {
    let (name, gitea) = ("gitea.token", &world.config.gitea);
    if gitea.uuid.is_empty() {
        return Item::unknown(name, "there is no registration to try", "run `gitea-dynamic-runner register`");
    }
    let credentials = Some((gitea.uuid.as_str(), &gitea.token));
    let rpc = RunnerRpc::to_gitea_through(&world.config.proxies(), &gitea.url, gitea.ca_file.as_deref(), credentials);
    let rpc = match rpc {
        Ok(rpc) => rpc,
        Err(e) => return Item::todo(name, e.0, "correct the setting that it names"),
    };
    let asked = tokio::time::timeout(RPC_LIMIT, report::heartbeat(&rpc, TaskId(i64::MAX))).await;
    match asked {
        Ok(Ok(_)) => Item::fine(name, "Gitea knows this runner and takes its token"),
        Ok(Err(e)) if e.fault == RpcFault::Unregistered => Item::todo(
            name,
            "Gitea does not take the runner's UUID and token: the runner was deleted there, or the token is another one's",
            "remove private/credentials.json and `register` anew, or correct GITEA_RUNNER_UUID and GITEA_RUNNER_TOKEN_FILE; running jobs fail with the old registration",
        ),
        Ok(Err(e)) if e.fault == RpcFault::Unimplemented => Item::todo(
            name,
            "Gitea has no Actions there",
            "enable them ([actions] ENABLED = true), and let a proxy in front of Gitea pass /api/actions",
        ),
        Ok(Err(e)) => {
            Item::unknown(name, format!("Gitea answers neither yes nor no: {e}"), "ask again; Gitea's own log says more")
        }
        Err(_) => {
            Item::unknown(name, format!("no answer within {} s", RPC_LIMIT.as_secs()), "ask again; Gitea's own log says more")
        }
    }
}

#[derive(Deserialize)]
struct RunnerView {
    #[serde(default)]
    disabled: bool,
    #[serde(default)]
    labels: Vec<LabelView>,
}

#[derive(Deserialize)]
struct LabelView {
    name: String,
}

/// Gitea alone knows what is declared, and tells it only to an administrator's or the runner's owner's token.
async fn labels(world: &World, web: &Web) -> Item {
    let (name, gitea) = ("gitea.labels", &world.config.gitea);
    let by_hand =
        "look at the runner on Gitea's page of runners, or set GITEA_API_TOKEN_FILE to a token that may read it (read:admin)";
    let stored = std::fs::read(world.config.state_directory.join(CREDENTIALS_FILE)).map(zeroize::Zeroizing::new).ok();
    let stored = stored.and_then(|text| serde_json::from_slice::<StoredCredentials>(&text).ok());
    let Some(id) = stored.filter(|stored| stored.uuid == gitea.uuid).map(|stored| stored.id) else {
        return Item::unknown(
            name,
            "which labels Gitea knows of this runner is not known: its number there is only kept by `register`",
            by_hand,
        );
    };
    let Some(token) = &gitea.api_token else {
        return Item::unknown(name, "which labels Gitea knows of this runner is not known: no API token is set", by_hand);
    };
    let mut refused = String::new();
    for scope in ["admin", "user"] {
        match web.get(&format!("{}/api/v1/{scope}/actions/runners/{id}", gitea.url), Some(token)).await {
            Ok(answer) if answer.status.is_success() => match serde_json::from_slice(&answer.body) {
                Ok(view) => return judge_labels(world, &view),
                Err(e) => refused = format!("Gitea's answer is not understood: {e}"),
            },
            Ok(answer) => refused = format!("Gitea answers {} to this API token", answer.status.as_u16()),
            Err(why) => refused = why,
        }
    }
    Item::unknown(name, refused, by_hand)
}

fn judge_labels(world: &World, view: &RunnerView) -> Item {
    let name = "gitea.labels";
    if view.disabled {
        return Item::todo(
            name,
            "the runner is disabled in Gitea, so no job is given to it",
            "enable it on Gitea's page of runners",
        );
    }
    let config = &world.config;
    let vm = config.vm.is_some().then(|| config.vm_label.clone());
    let wanted: Vec<String> =
        std::iter::once("self-hosted".to_owned()).chain(config.pod.is_some().then(|| "pod".to_owned())).chain(vm).collect();
    let declared: Vec<&str> = view.labels.iter().map(|label| label.name.as_str()).collect();
    let missing: Vec<_> = wanted.iter().filter(|label| !declared.contains(&label.as_str())).map(String::as_str).collect();
    if missing.is_empty() {
        return Item::fine(name, format!("declared: {}", declared.join(", ")));
    }
    let said = format!("Gitea does not know the label(s) {} of this runner, so jobs that ask for them wait", missing.join(", "));
    match world.running {
        Some(_) => Item::note(
            name,
            said,
            "while a pool is full its label is withdrawn, so look again; `gitea-dynamic-runner status` shows the slots",
        ),
        None => Item::todo(name, said, "start the controller: it declares them"),
    }
}

/// Gitea builds addresses for jobs (artifacts, clones, its own actions) from its ROOT_URL, whatever we call it.
async fn root_url(world: &Arc<World>, web: &Web) -> Vec<Item> {
    let (name, gitea) = ("gitea.root_url", &world.config.gitea);
    let Some(root) = believed(web, &gitea.url).await else {
        let to_do = "compare ROOT_URL in its app.ini with GITEA_URL: they should be the same";
        return vec![Item::unknown(name, "what Gitea believes its ROOT_URL to be is not told to strangers", to_do)];
    };
    let to_do = format!(
        "jobs are given addresses below {root} (artifacts, actions): make it reachable from this machine, or correct ROOT_URL in Gitea's app.ini"
    );
    if root != gitea.url {
        let reached = match Web::towards(&world.config.proxies(), &root, gitea.ca_file.as_deref()) {
            Ok(web) => web.get(&format!("{root}/api/v1/version"), None).await,
            Err(e) => Err(e.0),
        };
        if let Err(why) = reached {
            return vec![Item::todo(
                name,
                format!("Gitea believes to be {root}, which cannot be reached from here: {why}"),
                to_do,
            )];
        }
    }
    let mut items = vec![if root == gitea.url {
        Item::fine(name, format!("Gitea believes to be {root}, as GITEA_URL says"))
    } else {
        Item::note(
            name,
            format!("Gitea believes to be {root}, and GITEA_URL is {}; both answer", gitea.url),
            "set GITEA_URL to Gitea's ROOT_URL, unless the two differ on purpose",
        )
    }];
    items.extend(as_a_job(world, &root, to_do).await);
    items
}

/// From another user, firewall rules may differ. Without isolation jobs are of our own user, and through a proxy it is not this way.
async fn as_a_job(world: &World, root: &str, to_do: String) -> Option<Item> {
    let local = &world.config.local;
    let Ok(Isolation::UidPerSlot { base }) = Isolation::choose(local.without_isolation, local.executor_uid) else { return None };
    if !local.proxy.is_empty() {
        return None;
    }
    let uri: Uri = root.parse().ok()?;
    let port = uri.port_u16().unwrap_or(if uri.scheme_str() == Some("https") { 443 } else { 80 });
    let address = format!("{}:{port}", uri.host()?);
    match child::run(&["reach", &base.to_string(), &address]).await {
        Ok(()) => Some(Item::fine("gitea.root_url.job", format!("the user {base} of jobs reaches {address}"))),
        Err(why) => {
            Some(Item::todo("gitea.root_url.job", format!("the user {base} of jobs does not reach {address}: {why}"), to_do))
        }
    }
}

#[derive(Deserialize)]
struct OpenId {
    issuer: String,
}

#[derive(Deserialize)]
struct Repositories {
    data: Vec<Repository>,
}

#[derive(Deserialize)]
struct Repository {
    clone_url: String,
    full_name: String,
}

/// From its OpenID page, else from the clone address of a public repository.
async fn believed(web: &Web, url: &str) -> Option<String> {
    if let Ok(answer) = web.get(&format!("{url}/.well-known/openid-configuration"), None).await
        && let Ok(OpenId { issuer }) = serde_json::from_slice(&answer.body)
    {
        return Some(issuer.trim_end_matches('/').to_owned());
    }
    let answer = web.get(&format!("{url}/api/v1/repos/search?limit=1"), None).await.ok()?;
    let Repository { clone_url, full_name } =
        serde_json::from_slice::<Repositories>(&answer.body).ok()?.data.into_iter().next()?;
    clone_url.strip_suffix(&format!("/{full_name}.git")).map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::State;

    #[test]
    fn a_clock_is_off_only_where_no_reading_of_the_answers_says_otherwise() {
        // Asked at 10.0 s, answered at 10.2 s, by our clock.
        let at = |date: i64| judge_clock(ahead(&[(10_000, date * 1000, 10_200)])).state;
        assert_eq!([6, 7, 12, 13].map(at), [State::Todo, State::Fine, State::Fine, State::Todo]);
        // A second answer, in which the second had just changed, narrows it: more than 2 s behind is seen.
        let two = [(10_000, 12_000, 10_010), (10_350, 13_000, 10_360)];
        assert_eq!(ahead(&two), (2640, 3000));
        assert_eq!(judge_clock(ahead(&two)).state, State::Todo);
        // A slow answer proves nothing about small differences.
        assert_eq!(judge_clock(ahead(&[(10_000, 13_000, 14_000)])).state, State::Fine);
    }

    #[test]
    fn versions_are_told_apart() {
        assert_eq!(number("1.27.3"), Some((1, 27)));
        assert_eq!(number("1.28.0+dev-12-gabc"), Some((1, 28)));
        assert_eq!(number("v1.9.0"), Some((1, 9)));
        assert_eq!(number("dev"), None);
    }
}
