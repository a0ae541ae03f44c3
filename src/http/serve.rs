//! The accept loop of the operator's HTTP: so many connections at once, and so long for a head and for a whole connection.
//!
//! What is answered, and to whom, is the router's.

use std::{sync::Arc, time::Duration};

use axum::Router;
use hyper_util::{
    rt::{TokioExecutor, TokioIo, TokioTimer},
    server::conn::auto::Builder,
    service::TowerToHyperService,
};
use tokio::{net::TcpListener, sync::Semaphore};
use tokio_util::sync::CancellationToken;

/// Connections at once; a page needs a handful.
const CONNECTIONS: usize = 64;
/// To send the head of a request, and for a whole connection.
const HEAD_LIMIT: Duration = Duration::from_secs(10);
const CONNECTION_LIMIT: Duration = Duration::from_secs(120);

/// Serves until `stop`.
pub async fn serve(listener: TcpListener, router: Router, stop: CancellationToken) {
    let places = Arc::new(Semaphore::new(CONNECTIONS));
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = stop.cancelled() => return,
        };
        let Ok((tcp, _)) = accepted else {
            // Out of file descriptors, most likely: a moment later some are free.
            tokio::time::sleep(Duration::from_millis(100)).await;
            continue;
        };
        let Ok(place) = Arc::clone(&places).try_acquire_owned() else { continue };
        let (service, stop) = (TowerToHyperService::new(router.clone()), stop.clone());
        tokio::spawn(async move {
            let mut builder = Builder::new(TokioExecutor::new());
            builder.http1().timer(TokioTimer::new()).header_read_timeout(HEAD_LIMIT).max_buf_size(64 << 10);
            let connection = builder.serve_connection(TokioIo::new(tcp), service);
            tokio::select! {
                // How a reader's connection ends is his affair.
                _ = tokio::time::timeout(CONNECTION_LIMIT, connection) => {}
                () = stop.cancelled() => {}
            }
            drop(place);
        });
    }
}
