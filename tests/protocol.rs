//! Gitea's runner protocol, as Gitea speaks it and as the stand-in forge must.
//!
//! Every check is written once and runs on both: on the stand-in always (`standin`), on real servers where the group `gitea` is
//! tested (`real_gitea`). A difference between the two is a fault of the stand-in; one between versions is a fact in `under_test`.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "protocol/endings.rs"]
mod endings;
#[path = "protocol/fetching.rs"]
mod fetching;
#[path = "protocol/reports.rs"]
mod reports;
#[path = "protocol/runner.rs"]
mod runner;
mod support;
#[path = "protocol/under_test.rs"]
mod under_test;
#[path = "protocol/words.rs"]
mod words;

/// Each check a test on the stand-in; all of them one after the other on a real server, which takes seconds to start.
macro_rules! checks {
    ($($room:ident: $($check:ident)*;)*) => {
        mod standin {
            $($(
                #[tokio::test]
                async fn $check() {
                    crate::$room::$check(&crate::under_test::StandIn::start().await).await;
                }
            )*)*
        }

        mod real_gitea {
            use std::panic::AssertUnwindSafe;

            use futures::FutureExt as _;

            use crate::{support::gitea::Version, under_test::Real};

            async fn every_check_passes(version: Version) {
                let forge = Real::start(version).await;
                let mut failed = Vec::new();
                $($(
                    eprintln!("check {}::{}", stringify!($room), stringify!($check));
                    if AssertUnwindSafe(Box::pin(crate::$room::$check(&forge))).catch_unwind().await.is_err() {
                        failed.push(stringify!($check));
                    }
                )*)*
                assert!(failed.is_empty(), "{version:?} differs in {failed:#?}");
            }

            #[tokio::test]
            async fn gitea_1_27_speaks_as_the_stand_in_does() {
                every_check_passes(Version::Current).await;
            }

            #[tokio::test]
            async fn gitea_1_26_speaks_as_the_stand_in_does_but_for_known_facts() {
                every_check_passes(Version::Old).await;
            }
        }
    };
}

checks! {
    words:
        nobody_is_told_unregistered_runner
        the_task_of_another_and_an_unknown_one_are_refused
        register_makes_a_runner_each_time_or_says_why_not
        declare_tells_the_capabilities_of_the_server
        a_task_holds_what_its_job_needs
        json_is_spoken_too
        what_is_not_the_protocol_is_refused_by_http;
    fetching:
        the_version_decides_whether_a_job_is_looked_for
        an_end_moves_the_version_only_while_others_wait
        every_job_is_handed_out_once_and_the_oldest_first
        a_throttled_fetch_echoes_the_version_that_it_asked_with
        labels_match_exactly
        a_withdrawn_label_holds_jobs_back_and_does_not_touch_running_ones
        a_runner_without_labels_gets_only_jobs_without_labels
        a_disabled_runner_gets_nothing_until_it_is_enabled
        needs_bring_results_and_outputs_and_a_failed_one_skips;
    reports:
        rows_are_taken_once_and_without_gaps
        big_logs_are_taken
        an_end_of_the_log_without_rows_seals_it
        the_first_end_stays
        steps_are_taken_by_number
        an_end_without_steps_and_times_is_taken
        outputs_are_kept_once_and_within_limits;
    endings:
        a_cancel_ends_a_job_at_once_where_the_runner_lacks_the_capability
        a_cancel_waits_for_a_runner_with_the_capability
        a_declare_without_the_capability_withdraws_it
        a_job_cancelled_while_it_waits_is_not_handed_out
        silence_ends_a_job_and_heartbeats_keep_it
        a_deleted_runner_is_unregistered_and_its_job_fails_later
        the_task_of_a_deleted_repository_is_gone
        an_ephemeral_runner_is_gone_after_its_task;
}
