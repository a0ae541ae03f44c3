//! Between the disk here and NATS: nothing that was promised is lost, doubled or out of order.

use std::time::{Duration, Instant};

use gitea_dynamic_runner::{
    ids::{Lane, TaskId},
    queue::{AssignmentQueue as _, Published, QueueError, QueueHealth, Settled},
};

use crate::{
    bench::{AT_ONCE, Bench, SOON, open, sealed},
    support::{
        eventually,
        nats::{Nats, NatsOptions},
    },
};

#[tokio::test(flavor = "multi_thread")]
async fn what_is_published_while_nats_is_away_is_kept_here_and_drained_in_order() {
    let mut bench = Bench::new().await;
    bench.publish(1).await;
    bench.nats.kill9();
    for task in [5, 3, 4] {
        assert_eq!(bench.publish(task).await, Published::Stored);
        assert_eq!(bench.publish(task).await, Published::Duplicate, "what waits here is held");
    }
    let held = bench.queue().get(TaskId(3)).await.unwrap().unwrap();
    assert_eq!((held.lane, held.sealed), (Lane::Pod, sealed(3)));
    assert!(matches!(bench.queue().list(Lane::Pod).await, Err(QueueError::Unavailable(_))), "unknown is not none");
    assert!(matches!(bench.queue().health().await, QueueHealth::Unfit(_)));
    assert!(bench.queue().lease(Lane::Pod, AT_ONCE).await.unwrap().is_none());
    assert_eq!(bench.queue().highest_task().await, Ok(Some(TaskId(5))));

    // Also over a restart of ours.
    bench.close();
    bench.open().await;
    assert_eq!(bench.waiting().await, 3);
    bench.nats.start_again().await;
    bench.drained().await;
    bench.is_fine().await;
    assert_eq!(bench.tasks().await, [1, 5, 3, 4]);
    assert_eq!(bench.empty().await, [1, 5, 3, 4]);
    assert_eq!(bench.nats.admin().await.messages("CI_RUNNER").await, 0);
}

/// The producer cannot hear answers: what it publishes is stored, and it never learns it.
async fn deaf_producer() -> Bench {
    let replace = vec![("\"_INBOX_producer.>\"", "\"_INBOX_nobody.>\"".to_owned())];
    let nats = Nats::start_with(NatsOptions { replace, ..Default::default() }).await;
    nats.set_up().await;
    let bench = Bench::over(nats).await;
    bench.queue().tend().await;
    assert_eq!(bench.publish(7).await, Published::Stored);
    assert_eq!(bench.nats.admin().await.messages("CI_RUNNER").await, 1);
    bench
}

#[tokio::test(flavor = "multi_thread")]
async fn a_row_that_nats_has_already_is_removed_and_not_stored_again() {
    let mut bench = deaf_producer().await;
    assert_eq!(bench.tasks().await, [7], "here and there, and listed once");
    bench.close();
    bench.open().await;
    bench.drained().await;
    assert_eq!(bench.nats.admin().await.messages("CI_RUNNER").await, 1);
    assert_eq!(bench.empty().await, [7]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_row_whose_message_was_settled_before_it_was_removed_does_not_run_again() {
    let mut bench = deaf_producer().await;
    bench.close();
    bench.open().await;
    // Leased at once, perhaps before the drainer has looked at its row.
    let lease = bench.lease().await;
    assert_eq!(bench.queue().complete(lease).await, Ok(Settled::Done));
    bench.drained().await;
    assert_eq!(bench.queue().get(TaskId(7)).await, Ok(None));
    assert_eq!(bench.nats.admin().await.messages("CI_RUNNER").await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_task_id_that_a_restored_gitea_gives_anew_is_a_new_job_though_the_old_one_was_acknowledged_just_now() {
    let bench = Bench::new().await;
    bench.publish(7).await;
    let lease = bench.lease().await;
    bench.queue().complete(lease).await.unwrap();
    assert_eq!(bench.publish(7).await, Published::Stored);
    assert_eq!(bench.lease().await.task, TaskId(7));
}

#[tokio::test(flavor = "multi_thread")]
async fn the_end_of_an_old_job_does_not_take_the_new_one_of_its_id_along() {
    let bench = Bench::new().await;
    bench.publish(7).await;
    let old = bench.lease().await;
    bench.nats.freeze();
    // A restored Gitea gives the id anew while nobody can look into NATS.
    assert_eq!(bench.queue().publish(Lane::Pod, TaskId(7), b"newer").await, Ok(Published::Stored));
    bench.nats.thaw();
    let settled = eventually("NATS answers", SOON, async || bench.queue().complete(old.clone()).await.ok()).await;
    assert!(matches!(settled, Settled::Done | Settled::AlreadyGone), "{settled:?}");
    bench.drained().await;
    assert_eq!(bench.lease().await.sealed, b"newer");
}

#[tokio::test(flavor = "multi_thread")]
async fn of_two_assignments_of_a_task_the_one_that_was_promised_last_takes_the_place() {
    let mut bench = Bench::new().await;
    bench.publish(7).await;
    bench.publish(8).await;
    // Another lane is another subject, and still the same task.
    assert_eq!(bench.queue().publish(Lane::Vm, TaskId(7), b"other").await, Ok(Published::Duplicate));
    bench.nats.kill9();
    // Nobody can know what NATS holds, so this is taken: a restored Gitea may have given the id anew.
    assert_eq!(bench.queue().publish(Lane::Vm, TaskId(7), b"newer").await, Ok(Published::Stored));
    bench.nats.start_again().await;
    bench.drained().await;
    bench.is_fine().await;
    assert_eq!(bench.tasks().await, [8]);
    let held = bench.queue().get(TaskId(7)).await.unwrap().unwrap();
    assert_eq!((held.lane, held.sealed.as_slice()), (Lane::Vm, b"newer".as_slice()));
}

#[tokio::test(flavor = "multi_thread")]
async fn what_waits_here_is_listed_counted_and_can_be_cancelled() {
    let bench = Bench::new().await;
    bench.publish(1).await;
    bench.nats.freeze();
    let (second, third) = tokio::join!(bench.publish(2), bench.publish(3));
    assert_eq!((second, third), (Published::Stored, Published::Stored), "on our disk is stored");
    bench.nats.thaw();
    assert_eq!(bench.tasks().await, [1, 2, 3]);
    let cancelled = eventually("NATS answers", SOON, async || bench.queue().cancel(Lane::Pod, TaskId(2)).await.ok()).await;
    assert!(cancelled);
    assert_eq!(bench.queue().cancel(Lane::Pod, TaskId(2)).await, Ok(false));
    bench.drained().await;
    assert_eq!(bench.empty().await, [1, 3]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_damaged_outbox_is_refused_with_the_way_out_and_left_as_it_is() {
    let mut bench = Bench::new().await;
    bench.close();
    let path = bench.outbox();
    let whole = std::fs::read(&path).unwrap();
    for damaged in [Vec::new(), b"no database".to_vec(), whole[..whole.len() / 2].to_vec()] {
        std::fs::write(&path, &damaged).unwrap();
        let refused = open(&path, bench.nats.settings()).await.err().unwrap();
        assert!(matches!(refused, QueueError::Damaged(_)), "{refused}");
        let text = refused.to_string();
        assert!(
            text.contains("NATS has not acknowledged yet") && text.contains(&format!("mv {0} {0}.bad", path.display())),
            "{text}"
        );
        assert_eq!(std::fs::read(&path).unwrap(), damaged);
    }
    std::fs::write(&path, whole).unwrap();
    bench.open().await;
    let second = open(&path, bench.nats.settings()).await.err().unwrap();
    assert!(matches!(second, QueueError::InUse(_)), "{second}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_waiting_pull_wakes_within_a_second_of_the_servers_return() {
    let mut bench = Bench::new().await;
    let admin_settings = bench.nats.settings();
    let waiting = async {
        let lease = bench.queue.as_ref().unwrap().lease(Lane::Pod, SOON).await;
        (lease.unwrap().expect("an assignment"), Instant::now())
    };
    let restart = async {
        tokio::time::sleep(Duration::from_millis(300)).await;
        bench.nats.kill9();
        tokio::time::sleep(Duration::from_secs(2)).await;
        bench.nats.start_again().await;
        let producer = async_nats::ConnectOptions::with_user_and_password("producer".into(), "producer-secret".into())
            .custom_inbox_prefix("_INBOX_producer")
            .connect(&admin_settings.url)
            .await
            .unwrap();
        // The client's own pause between attempts is up to four seconds; what is measured is what comes after it.
        let mut headers = async_nats::HeaderMap::new();
        headers.insert("Nats-Msg-Id", "x");
        producer.request_with_headers("ci.assignment.pod.9", headers, sealed(9).into()).await.unwrap();
        Instant::now()
    };
    let ((lease, leased_at), stored_at) = tokio::join!(waiting, restart);
    assert_eq!(lease.task, TaskId(9));
    let took = leased_at.saturating_duration_since(stored_at);
    assert!(took < Duration::from_secs(1), "{took:?} after it was stored");
}
