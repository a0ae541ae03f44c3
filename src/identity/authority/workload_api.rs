//! The SPIFFE Workload API, as much as X.509 needs: `FetchX509SVID` and `FetchX509Bundles`; all else answers UNIMPLEMENTED.
//!
//! Messages and paths are those of the SPIFFE Workload API specification (the service has no package). One socket stands for one
//! ID. A stranger's connection is closed at once and takes no place, so that no job can use up the places of another's socket.

use std::{
    convert::Infallible,
    future::Future,
    pin::{Pin, pin},
    sync::Arc,
    task::{Context, Poll},
    time::{Duration, SystemTime},
};

use bytes::Bytes;
use futures::{Stream, stream::BoxStream};
use hyper::{body::Incoming, server::conn::http2};
use hyper_util::{
    rt::{TokioExecutor, TokioIo, TokioTimer},
    service::TowerToHyperService,
};
use spiffe::SpiffeId;
use tokio::{
    net::{UnixListener, UnixStream},
    sync::{OwnedSemaphorePermit, Semaphore},
    task::JoinSet,
    time::{sleep, timeout},
};
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status, body::Body, server::Grpc};

use super::ca::Issuer;
use crate::identity::wall_clock;

/// Connections of one socket. An executor needs one, and the tools of a job some more.
const CONNECTIONS: usize = 16;
const STREAMS_PER_CONNECTION: u32 = 8;
/// How long an ending connection may take to say so.
const CLOSING: Duration = Duration::from_secs(1);

#[derive(Clone, PartialEq, prost::Message)]
struct X509SvidRequest {}

#[derive(Clone, PartialEq, prost::Message)]
struct X509BundlesRequest {}

#[derive(Clone, PartialEq, prost::Message)]
struct X509Svid {
    #[prost(string, tag = "1")]
    spiffe_id: String,
    /// DER, the leaf first.
    #[prost(bytes = "bytes", tag = "2")]
    x509_svid: Bytes,
    /// PKCS #8, DER.
    #[prost(bytes = "bytes", tag = "3")]
    x509_svid_key: Bytes,
    /// DER certificates, one after another.
    #[prost(bytes = "bytes", tag = "4")]
    bundle: Bytes,
}

#[derive(Clone, PartialEq, prost::Message)]
struct X509SvidResponse {
    #[prost(message, repeated, tag = "1")]
    svids: Vec<X509Svid>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct X509BundlesResponse {
    /// By trust domain (`spiffe://td`).
    #[prost(map = "string, bytes", tag = "2")]
    bundles: std::collections::HashMap<String, Vec<u8>>,
}

/// What one socket serves.
#[derive(Clone)]
pub(super) struct Api {
    pub(super) issuer: Arc<Issuer>,
    pub(super) spiffe_id: SpiffeId,
    pub(super) stop: CancellationToken,
}

/// Serves `listener` to `uid` and root, until the API's token is cancelled.
pub(super) async fn serve(listener: UnixListener, api: Api, uid: u32) {
    let places = Arc::new(Semaphore::new(CONNECTIONS));
    let mut tasks = JoinSet::new();
    let mut warned = false;
    loop {
        tokio::select! {
            () = api.stop.cancelled() => break,
            Some(_) = tasks.join_next(), if !tasks.is_empty() => {}
            accepted = listener.accept() => match accepted {
                Ok((stream, _)) => match admit(&stream, uid, &places) {
                    Ok(place) => {
                        tasks.spawn(connection(stream, api.clone(), place));
                    }
                    Err(reason) if !warned => {
                        warned = true;
                        tracing::warn!(spiffe_id = %api.spiffe_id, reason, "refused a connection to a Workload API socket; further ones are not logged");
                    }
                    Err(_) => {}
                },
                Err(error) => {
                    tracing::warn!(%error, "accept on a Workload API socket");
                    sleep(Duration::from_millis(rand::random_range(100..200))).await;
                }
            },
        }
    }
    drop(listener);
    while tasks.join_next().await.is_some() {}
}

fn admit(stream: &UnixStream, uid: u32, places: &Arc<Semaphore>) -> Result<OwnedSemaphorePermit, String> {
    let peer = stream.peer_cred().map_err(|e| format!("no peer credentials: {e}"))?;
    if peer.uid() != uid && peer.uid() != 0 {
        return Err(format!("it is for uid {uid}, and uid {} came", peer.uid()));
    }
    places.clone().try_acquire_owned().map_err(|_| format!("it has {CONNECTIONS} connections already"))
}

/// Ends by the client, or within [`CLOSING`] of the token.
async fn connection(stream: UnixStream, api: Api, _place: OwnedSemaphorePermit) {
    let stop = api.stop.clone();
    let mut connection = pin!(
        http2::Builder::new(TokioExecutor::new())
            .timer(TokioTimer::new())
            .keep_alive_interval(Duration::from_secs(30))
            .max_concurrent_streams(STREAMS_PER_CONNECTION)
            .serve_connection(TokioIo::new(stream), TowerToHyperService::new(api))
    );
    tokio::select! {
        _ = connection.as_mut() => return,
        () = stop.cancelled() => {}
    }
    connection.as_mut().graceful_shutdown();
    drop(timeout(CLOSING, connection).await);
}

impl tower::Service<http::Request<Incoming>> for Api {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Incoming>) -> Self::Future {
        let api = self.clone();
        Box::pin(async move {
            Ok(match request.uri().path() {
                "/SpiffeWorkloadAPI/FetchX509SVID" => {
                    let call = tower::service_fn(move |r: Request<X509SvidRequest>| api.clone().answer(r, Api::svids));
                    Grpc::new(tonic_prost::ProstCodec::default()).server_streaming(call, request).await
                }
                "/SpiffeWorkloadAPI/FetchX509Bundles" => {
                    let call = tower::service_fn(move |r: Request<X509BundlesRequest>| api.clone().answer(r, Api::bundles));
                    Grpc::new(tonic_prost::ProstCodec::default()).server_streaming(call, request).await
                }
                _ => Status::unimplemented("this authority issues X.509-SVIDs only").into_http(),
            })
        })
    }
}

/// A complete answer, and when it should be followed by another even if nothing changes.
type Answer<R> = Result<(R, SystemTime), Status>;

impl Api {
    fn svids(&self) -> Answer<X509SvidResponse> {
        let leaf = self.issuer.leaf(&self.spiffe_id).map_err(|error| {
            tracing::error!(spiffe_id = %self.spiffe_id, error = format!("{error:#}"), "sign an SVID");
            Status::unavailable("no SVID can be signed now")
        })?;
        let half = leaf.not_after.duration_since(SystemTime::now()).unwrap_or_default() / 2;
        let svid = X509Svid {
            spiffe_id: self.spiffe_id.to_string(),
            x509_svid: leaf.certificate,
            x509_svid_key: leaf.key,
            bundle: self.issuer.bundle(),
        };
        Ok((X509SvidResponse { svids: vec![svid] }, SystemTime::now() + half.mul_f64(rand::random_range(0.9..=1.0))))
    }

    fn bundles(&self) -> Answer<X509BundlesResponse> {
        let bundles = [(self.issuer.trust_domain().id_string(), self.issuer.bundle().to_vec())].into();
        Ok((X509BundlesResponse { bundles }, SystemTime::now() + Duration::from_secs(24 * 3600)))
    }

    async fn answer<Q, R: Send + 'static>(
        self,
        request: Request<Q>,
        make: fn(&Self) -> Answer<R>,
    ) -> Result<Response<BoxStream<'static, Result<R, Status>>>, Status> {
        // The specification asks for this header, against requests that a browser was tricked into.
        if request.metadata().get("workload.spiffe.io").map(|v| v.as_bytes()) != Some(b"true") {
            return Err(Status::invalid_argument("security header missing from request"));
        }
        let changes = self.issuer.changes();
        // Made before the answer starts, so that a failure is the call's status.
        let (first, due) = make(&self)?;
        let rest = self.rest(changes, due, make);
        Ok(Response::new(Box::pin(futures::StreamExt::chain(futures::stream::iter([Ok(first)]), rest))))
    }

    /// Answers anew at each change and when the last one is due, until the token is cancelled or an answer fails.
    fn rest<R: Send + 'static>(
        self,
        changes: tokio::sync::watch::Receiver<()>,
        due: SystemTime,
        make: fn(&Self) -> Answer<R>,
    ) -> impl Stream<Item = Result<R, Status>> + Send {
        futures::stream::unfold(Some((self, changes, due)), move |state| async move {
            let (api, mut changes, due) = state?;
            tokio::select! {
                () = api.stop.cancelled() => return None,
                changed = changes.changed() => changed.ok()?,
                () = wall_clock(due) => {}
            }
            match make(&api) {
                Ok((answer, due)) => Some((Ok(answer), Some((api, changes, due)))),
                Err(status) => Some((Err(status), None)),
            }
        })
    }
}
