//! Where the controller listens: free, or its own; and what a running one says of itself.

use std::{
    io,
    net::{IpAddr, SocketAddr},
    sync::Arc,
    time::Duration,
};

use bytes::Bytes;
use http_body_util::{BodyExt as _, Empty, Limited};
use hyper_util::{client::legacy::Client, rt::TokioExecutor};
use tokio::net::TcpSocket;

use super::{Item, World};

const LIMIT: Duration = Duration::from_secs(5);
const MAX_BYTES: usize = 64 << 10;

pub(super) async fn probe(world: &Arc<World>) -> Vec<Item> {
    let http = &world.config.http;
    let (page, health) = tokio::join!(ask(http.listen, "/readyz"), ask(http.listen, "/healthz"));
    let ours = health.as_ref().is_ok_and(|(status, text)| *status == 200 && text.starts_with("ok"));
    let mut items = Vec::new();
    if let Some(pid) = world.running {
        items.push(match page {
            Ok((200, _)) => Item::fine("controller", format!("it runs ({pid}) and is ready")),
            Ok((_, text)) => {
                let reasons: Vec<&str> = text.lines().skip(1).take(8).collect();
                Item::todo(
                    "controller",
                    format!("it runs ({pid}) and is not ready: {}", reasons.join("; ")),
                    "each reason says what; its log has more",
                )
            }
            Err(why) => Item::todo(
                "controller",
                format!("it runs ({pid}) and does not answer at {}: {why}", http.listen),
                "if HTTP_LISTEN was changed, restart it; if it hangs, its log says where",
            ),
        });
    } else {
        items.push(Item::note("controller", "none runs on this state folder", "start it when everything here is fine"));
    }
    items.push(port(world, "http", "HTTP_LISTEN", http.listen, ours));
    items.push(port(world, "facade", "RUNNER_FACADE_LISTEN", world.config.facade.listen, world.running.is_some()));
    items
}

/// `ours`: if somebody listens, it is the controller of this state folder.
fn port(world: &World, name: &'static str, variable: &str, address: SocketAddr, ours: bool) -> Item {
    match (bindable(address), world.running) {
        (Ok(()), None) => Item::fine(name, format!("{variable}={address} is free")),
        (Ok(()), Some(_)) => Item::note(
            name,
            format!("{variable}={address} is free, though a controller runs here"),
            "it was started with another address: restart it to use this one",
        ),
        (Err(e), Some(_)) if e.kind() == io::ErrorKind::AddrInUse && ours => {
            Item::fine(name, format!("{variable}={address} is the running controller's"))
        }
        (Err(e), _) if e.kind() == io::ErrorKind::AddrInUse => Item::todo(
            name,
            format!("{variable}={address} is taken by another program"),
            format!("`ss -ltnp 'sport = :{}'` says whose it is: end that, or set {variable} to another port", address.port()),
        ),
        (Err(e), _) => Item::todo(
            name,
            format!("{variable}={address}: {e}"),
            format!("set {variable} to an address of this machine, as 127.0.0.1:{}", address.port()),
        ),
    }
}

/// Binds and does not listen, so that a controller which starts meanwhile is not in our way, nor we in its.
fn bindable(address: SocketAddr) -> io::Result<()> {
    if address.port() == 0 {
        return Ok(());
    }
    let socket = if address.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
    socket.set_reuseaddr(true)?;
    socket.bind(address)
}

async fn ask(address: SocketAddr, path: &str) -> Result<(u16, String), String> {
    let ip = match address.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => "127.0.0.1".to_owned(),
        IpAddr::V6(ip) if ip.is_unspecified() => "[::1]".to_owned(),
        IpAddr::V4(ip) => ip.to_string(),
        IpAddr::V6(ip) => format!("[{ip}]"),
    };
    let uri: http::Uri = format!("http://{ip}:{}{path}", address.port()).parse().map_err(|e| format!("{e}"))?;
    let client: Client<_, Empty<Bytes>> = Client::builder(TokioExecutor::new()).build_http();
    let ask = async {
        let request =
            http::Request::get(uri).header(http::header::HOST, "localhost").body(Empty::new()).map_err(|e| e.to_string())?;
        let answer = client.request(request).await.map_err(|e| e.to_string())?;
        let status = answer.status().as_u16();
        let body = Limited::new(answer.into_body(), MAX_BYTES).collect().await.map_err(|e| e.to_string())?;
        Ok((status, String::from_utf8_lossy(&body.to_bytes()).into_owned()))
    };
    tokio::time::timeout(LIMIT, ask).await.unwrap_or_else(|_| Err(format!("no answer within {} s", LIMIT.as_secs())))
}
