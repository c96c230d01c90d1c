//! The page of a notifier in a browser.

use std::sync::Arc;

use tokio::io::AsyncBufReadExt as _;

use crate::notifier::support::{Place, Receiver, TOKEN, event};
use crate::support::gremlin::{Act, Asked, Gremlin, answer};
use crate::support::headless::{Scripts, chromium, dom};

/// What an operator does: enter the token, pause an endpoint, and skip a head.
const HANDS: &str = r##"
const click = (selector) => document.querySelector(selector).click();
const wait = () => new Promise((done) => setTimeout(done, 1000));
(async () => {
  window.prompt = () => "by the page";
  const body = document.body;
  body.dataset.before = document.querySelectorAll("main table").length;
  click("#ask");
  document.getElementById("token").value = "wrong";
  click("#use");
  await wait();
  body.dataset.wrong = document.getElementById("message").textContent;
  click("#ask");
  document.getElementById("token").value = "token-of-the-test";
  click("#use");
  await wait();
  body.dataset.after = document.querySelectorAll("main table").length;
  click("main button[data-path='/v1/endpoints/ci/pause']");
  await wait();
  click("main button[data-path$='/skip-head']");
  await wait();
  body.dataset.done = document.getElementById("message").textContent;
})();
"##;

/// Passes requests on to a notifier; its page comes without its policy, and with hands.
async fn with_hands(address: String) -> Gremlin {
    let client = Arc::new(reqwest::Client::builder().no_proxy().build().expect("a client"));
    Gremlin::responding(move |asked: &Asked| {
        let (client, asked, address) = (Arc::clone(&client), asked.clone(), address.clone());
        Box::pin(async move { pass_on(&client, &asked, &address).await })
    })
    .await
}

async fn pass_on(client: &reqwest::Client, asked: &Asked, address: &str) -> Act {
    let mut words = asked.line.split(' ');
    let method = words.next().and_then(|method| method.parse().ok()).expect("a method");
    let path = words.next().expect("a path");
    let mut request = client.request(method, format!("{address}{path}")).body(asked.body.clone());
    for name in ["authorization", "content-type"] {
        if let Some(value) = asked.header(name) {
            request = request.header(name, value);
        }
    }
    let answered = request.send().await.expect("it answers");
    let kind =
        answered.headers().get("content-type").and_then(|kind| kind.to_str().ok()).unwrap_or_default().to_owned();
    let (status, text) = (answered.status().as_u16(), answered.text().await.expect("a text"));
    let text = if path == "/" { text.replace("</body>", &format!("<script>{HANDS}</script></body>")) } else { text };
    answer(status, &kind, text)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_page_shows_endpoints_lanes_attempts_and_messages_with_a_token_and_changes_them() {
    let Some(chromium) = chromium() else { return };
    let receiver = Receiver::answering(500).await;
    let place = Place::new(&[("ci", &receiver)]);
    let running = place.start().await;
    running.publish_all(&[event("1", "<b>a</b>"), event("2", "<b>a</b>")]).await;
    running.wait_for_status("ci", |status| status["health"]["failures"].as_u64() >= Some(1)).await;
    let client = reqwest::Client::builder().no_proxy().build().expect("a client");
    let page = client.get(format!("{}/", running.address())).send().await.expect("it answers");
    assert_eq!(page.status(), 200);
    let page = page.text().await.expect("a text");
    assert!(!page.contains("&lt;b&gt;a") && !page.contains(TOKEN), "nothing of the lanes without a token: {page}");
    let hands = with_hands(running.address().to_owned()).await;
    let seen = dom(&chromium, Scripts::On, &hands.url(), 12_000).await;
    let seen = seen.replace(HANDS, "");
    for part in [
        "data-before=\"0\"",
        "data-wrong=\"failed: wrong token",
        "data-after=\"4\"",
        "skip-head: done\"",
        "&lt;b&gt;a&lt;/b&gt;",
        "“by the page”",
        "HTTP 500",
    ] {
        assert!(seen.contains(part), "{part} in {seen}");
    }
    assert!(!seen.contains(TOKEN), "{seen}");
    let status = running.status("ci").await;
    assert_eq!(
        (&status["state"], &status["messages"], &status["note"]),
        (&"paused".into(), &1.into(), &"by the page".into())
    );
    running.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_policy_of_the_page_lets_its_own_script_run() {
    let Some(chromium) = chromium() else { return };
    let place = Place::new(&[]);
    let running = place.start().await;
    let seen = dom(&chromium, Scripts::On, &format!("{}/", running.address()), 3_000).await;
    assert!(seen.contains("<button id=\"ask\" type=\"button\">use a token</button>"), "{seen}");
    assert!(seen.contains("<span id=\"state\" class=\"good\">live</span>") && seen.contains("delivering"), "{seen}");
    running.stop().await;
}

#[tokio::test]
async fn a_console_and_the_notifier_show_messages_and_what_they_carry_with_a_token() {
    let receiver = Receiver::answering(200).await;
    let place = Place::new(&[("ci", &receiver)]);
    let running = place.start().await;
    running.publish_all(&[event("1", "a"), event("2", "b")]).await;
    receiver.wait_for(2).await;
    running.wait_for_status("ci", |status| status["messages"] == 0).await;
    place.write("token-of-notifier", TOKEN);
    let of_console = "the-token-of-the-console-0123456789";
    place.write("token-of-console", of_console);
    place.configure(&format!(
        "\n[http]\nlisten = \"127.0.0.1:0\"\ntoken_file = \"token-of-console\"\n\
         [console.target.hooks]\nkind = \"notifier\"\nurls = [\"{}\"]\ntoken_file = \"token-of-notifier\"\n",
        running.address()
    ));
    let mut console = tokio::process::Command::from(place.command(&["console"]));
    let mut console = console.stderr(std::process::Stdio::piped()).kill_on_drop(true).spawn().expect("it starts");
    let mut lines = tokio::io::BufReader::new(console.stderr.take().expect("a pipe")).lines();
    let address = loop {
        let line = lines.next_line().await.expect("it is read").expect("it goes on");
        let line: serde_json::Value = serde_json::from_str(&line).expect("JSON");
        if let Some(address) = line["address"].as_str() {
            break address.to_owned();
        }
    };
    let client = reqwest::Client::builder().no_proxy().build().expect("a client");
    let (console_url, own_url) = (format!("http://{address}"), running.address().to_owned());
    let page = async |url: &str, token: Option<&str>| {
        let asked = client.get(url);
        let asked = token.into_iter().fold(asked, |asked, token| asked.bearer_auth(token));
        asked.send().await.expect("it answers").text().await.expect("a text")
    };
    for (place, token) in [(format!("{console_url}/notifiers/hooks"), of_console), (own_url, TOKEN)] {
        for query in ["", "?contains=id"] {
            let found = page(&format!("{place}{query}"), None).await;
            assert!(
                !found.contains("delivered") && !found.contains("<td"),
                "a search tells what messages carry: {found}"
            );
        }
        let found = page(&place, Some(token)).await;
        assert!(found.contains("messages, latest event first") && found.contains("delivered"), "{found}");
        let found = page(&format!("{place}?endpoint=&key=&event_id=2&contains=&outcome="), Some(token)).await;
        assert!(
            found.contains("{&quot;id&quot;:&quot;2&quot;}") && !found.contains("{&quot;id&quot;:&quot;1&quot;}"),
            "{found}"
        );
        let other = page(&format!("{place}?outcome=dead"), Some(token)).await;
        assert!(other.contains("No message is like this."), "{other}");
    }
    let found = page(&console_url, None).await;
    assert!(!found.contains("delivered") && !found.contains("<td"), "{found}");
    console.kill().await.expect("it ends");
    running.stop().await;
}
