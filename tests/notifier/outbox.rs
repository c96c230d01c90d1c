//! Events that an application writes in its own transactions, and the tables of the notifier's database.

use std::process::Output;

use serde_json::json;

use crate::notifier::support::{Place, PostgresDatabase, Receiver, TOKEN, deaths, event, within};

const TABLE: &str = "app_outbox";

fn run(place: &Place, arguments: &[&str]) -> Output {
    place.command(arguments).output().expect("it runs")
}

fn place_with_outbox(database: &PostgresDatabase, receiver: &Receiver) -> Place {
    let place = Place::new(&[("ci", receiver)]);
    let PostgresDatabase { url, ca } = database;
    place.write("outbox", url);
    place.configure(&format!("\n[notifier.outbox]\nurl_file = \"outbox\"\nca_file = \"{ca}\"\ntable = \"{TABLE}\"\n"));
    let prepared = run(&place, &["notifier", "setup"]);
    assert_eq!(String::from_utf8_lossy(&prepared.stdout), format!("prepared table {TABLE}\n"), "{prepared:?}");
    assert!(run(&place, &["notifier", "setup"]).status.success(), "a second time");
    place
}

fn insert(number: usize) -> String {
    let event = event(&number.to_string(), &format!("key-{}", number % 3));
    format!("INSERT INTO {TABLE} (event) VALUES ('{event}');")
}

fn insert_all(numbers: std::ops::Range<usize>) -> String {
    numbers.map(insert).collect()
}

#[tokio::test]
async fn p2_what_an_application_has_committed_is_delivered_in_order_whatever_dies() {
    let Some(database) = PostgresDatabase::create().await else { return };
    let receiver = Receiver::answering(200).await;
    let place = place_with_outbox(&database, &receiver);
    let runs = deaths(2);
    for run in 0..runs {
        database.execute(&insert_all(run * 20..(run + 1) * 20)).await;
        // After the events are stored, and before their rows are gone.
        let notifier = place.spawn(&[("JOURNEYMAN_CRASH_POINT", "notifier-stored")]);
        assert_eq!(notifier.ends().await.signal(), Some(9));
        assert_eq!(database.query(&format!("SELECT id::text FROM {TABLE}")).await.len(), 20, "they are there still");
        let notifier = place.start().await;
        receiver.wait_for((run + 1) * 20).await;
        notifier.stop().await;
    }
    assert_eq!(receiver.check_order(), runs * 20);
    println!("{runs} kills, {} committed, 0 lost", runs * 20);
}

#[tokio::test]
async fn rows_are_taken_as_they_are_committed_and_what_is_no_event_stays_with_the_reason() {
    let Some(database) = PostgresDatabase::create().await else { return };
    let receiver = Receiver::answering(200).await;
    let place = place_with_outbox(&database, &receiver);
    let notifier = place.start().await;
    let bad = format!("INSERT INTO {TABLE} (event) VALUES ('{{\"password\": \"hunter2\"}}'), ('null');");
    database.execute(&format!("BEGIN; {} ROLLBACK;", insert_all(90..95))).await;
    database.execute(&format!("{}{bad}{}", insert_all(0..70), insert_all(70..80))).await;
    receiver.wait_for(80).await;
    let rest = within("the others are gone", async {
        loop {
            let rest = database.query(&format!("SELECT coalesce(error, 'waits') FROM {TABLE} ORDER BY id")).await;
            if rest.len() == 2 {
                return rest;
            }
        }
    });
    let rest = rest.await;
    assert!(rest.iter().all(|why| why.starts_with("invalid event at line 1") && !why.contains("hunter2")), "{rest:?}");
    let (_, metrics) = notifier.call("get", "/metrics", "").await;
    for line in ["{source=\"outbox\",result=\"accepted\"} 80.0", "{source=\"outbox\",result=\"refused\"} 2.0"] {
        assert!(metrics.contains(line), "{metrics}");
    }
    let log = notifier.stop().await;
    assert!(!log.contains("hunter2") && log.contains("a row is no event"), "{log}");
    assert_eq!(receiver.check_order(), 80);
}

#[tokio::test]
async fn a_notifier_without_the_right_to_make_tables_needs_them_made() {
    let receiver = Receiver::answering(200).await;
    let Some(database) = PostgresDatabase::create().await else { return };
    let owner = Place::new(&[("ci", &receiver)]).with_postgres(&database.url, &database.ca);
    let role = format!("runtime_{}", uuid::Uuid::new_v4().simple());
    database.execute(&format!("CREATE ROLE {role} LOGIN PASSWORD '{TOKEN}'")).await;
    let (_, host) = database.url.split_once('@').expect("a host");
    let runtime =
        Place::new(&[("ci", &receiver)]).with_postgres(&format!("postgres://{role}:{TOKEN}@{host}"), &database.ca);
    let refused = run(&runtime, &["notifier", "store", "migrate"]);
    let words = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(!refused.status.success() && words.contains("permission denied") && !words.contains(TOKEN), "{words}");

    for _ in 0..2 {
        let made = run(&owner, &["notifier", "store", "migrate"]);
        assert_eq!(String::from_utf8_lossy(&made.stdout), "the tables have the format of this version\n", "{made:?}");
    }
    let schema = "journeyman_notifier";
    let grant = format!(
        "GRANT USAGE ON SCHEMA {schema} TO {role}; GRANT ALL ON ALL TABLES IN SCHEMA {schema} TO {role};
         GRANT USAGE ON ALL SEQUENCES IN SCHEMA {schema} TO {role}"
    );
    database.execute(&grant).await;
    let notifier = runtime.start().await;
    notifier.publish_all(&[event("1", "a")]).await;
    receiver.wait_for(1).await;
    assert_eq!(
        notifier.publish(json!(event("1", "a")).to_string()).await,
        Some((202, json!({ "accepted": 0, "duplicates": 1 })))
    );
    notifier.stop().await;
}
